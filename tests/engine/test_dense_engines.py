"""The dense twin: AReaL's engine with packed sequences kept apart without flash."""

import functools

import pytest
import torch
from areal.api.cli_args import MicroBatchSpec
from areal.engine.fsdp_engine import FSDPPPOActor

from areal_dta.engine import DensePPOActor
from tests.engine.builders import (
    actor_config,
    build_engine,
    grpo_batch,
    one_sequence_each,
    relative_error,
    save_tiny_llama,
)
from tests.engine.checks import labelled, train_once

pytestmark = pytest.mark.usefixtures("world")


def outputs(engine_class, model, spec, **overrides):
    config = actor_config(model, mb_spec=spec, **overrides)
    engine = build_engine(engine_class, config)
    batch = grpo_batch()
    logp = labelled(engine.forward_batch(batch), batch)
    return logp, train_once(engine, batch)


@pytest.fixture(scope="module")
def alone(tiny_model, world):
    """AReaL's engine with nothing to leak: one sequence a micro-batch."""
    return outputs(FSDPPPOActor, tiny_model, one_sequence_each(6))


def test_stock_leaks_between_packed_sequences(tiny_model, alone):
    logp, update = outputs(FSDPPPOActor, tiny_model, MicroBatchSpec())
    assert (logp - alone[0]).abs().max() > 0.01
    assert relative_error(update["gradients"], alone[1]["gradients"]) > 0.01


@pytest.mark.parametrize("attn_impl", ["sdpa", "eager"])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_twin_does_not(tiny_model, alone, attn_impl, num_micro_batches):
    spec = MicroBatchSpec(n_mbs=num_micro_batches)
    logp, update = outputs(DensePPOActor, tiny_model, spec, attn_impl=attn_impl)
    assert (logp - alone[0]).abs().max() < 1e-5
    assert relative_error(update["gradients"], alone[1]["gradients"]) < 1e-5
    assert update["result"]["num_micro_batches"] == num_micro_batches


def test_a_model_that_builds_its_own_mask(tmp_path):
    """Llama makes a mask from what AReaL passes, where Qwen takes it as it is."""
    from transformers import AutoModelForCausalLM

    model = save_tiny_llama(tmp_path)
    logp, _ = outputs(DensePPOActor, model, MicroBatchSpec())
    batch = grpo_batch()
    reference = AutoModelForCausalLM.from_pretrained(model)
    mask = batch["attention_mask"]
    with torch.no_grad():
        logits = reference(batch["input_ids"], attention_mask=mask.long()).logits
    labels = batch["input_ids"].roll(-1, -1)[..., None]
    expected = logits.log_softmax(-1).gather(-1, labels).squeeze(-1)
    torch.testing.assert_close(logp, labelled(expected, batch), rtol=0, atol=1e-5)


def test_a_window_that_sdpa_would_ignore_is_refused(tmp_path):
    from tests.engine.builders import save_tiny_model

    model = save_tiny_model(
        tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=0
    )
    with pytest.raises(ValueError, match="exceeds sliding_window=4"):
        outputs(DensePPOActor, model, MicroBatchSpec())


def test_flash_attention_is_left_alone(tiny_model, monkeypatch):
    """AReaL's engine is right under flash attention: nothing is replaced."""
    replaced = []
    monkeypatch.setattr(
        FSDPPPOActor,
        "_create_device_model",
        lambda self: setattr(self, "model", Recorder(replaced)),
    )
    for attn_impl in ("flash_attention_2", "sdpa"):
        engine = DensePPOActor(actor_config(tiny_model, attn_impl=attn_impl))
        engine._create_device_model()
    assert replaced == ["areal_dta_packed_sdpa"]


class Recorder(torch.nn.Module):
    def __init__(self, replaced):
        super().__init__()
        self.set_attn_implementation = functools.partial(list.append, replaced)
