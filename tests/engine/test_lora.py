"""AReaL's LoRA on trees: the dense engine's gradients, and adapters that load."""

from types import SimpleNamespace

import pytest
import torch
from areal.api import SaveLoadMeta
from peft import PeftModel
from transformers import AutoModelForCausalLM

from areal_dta.engine import DensePPOActor, DTAPPOActor
from tests.engine.builders import (
    actor_config,
    build_engine,
    grpo_batch,
    one_sequence_each,
    parameters,
    relative_error,
)
from tests.engine.checks import labelled, train_once

pytestmark = pytest.mark.usefixtures("world")
FP32 = 1e-5


def lora_engine(engine_class, path, seed=0, **options):
    targets = options.pop("target_modules", ["all-linear"])
    config = actor_config(
        path,
        use_lora=True,
        lora_rank=4,
        lora_alpha=8,
        target_modules=targets,
        mb_spec=one_sequence_each(len(grpo_batch()["input_ids"])),
    )
    if engine_class is DTAPPOActor:
        values = {"block_tokens": 8, "retain_tokens": 16, **options}
        config.dta = SimpleNamespace(**values)
    torch.manual_seed(seed)
    engine = build_engine(engine_class, config)
    with torch.no_grad():  # B matrices start at zero, which stops A's gradients
        for parameter in engine.model.parameters():
            if parameter.requires_grad:
                local = parameter.to_local()
                generator = torch.Generator().manual_seed(local.numel())
                noise = torch.randn(local.shape, generator=generator)
                local.copy_(0.1 * noise)
    return engine


@pytest.mark.parametrize("options", [
    {}, {"reshard": "block"}, {"target_modules": ["q_proj", "lm_head"]},
    {"block_tokens": "auto", "retain_tokens": "auto"},
], ids=["step", "block", "head", "auto"])  # fmt: skip
@pytest.mark.parametrize("model", ["tiny_model", "tied_model"])
def test_an_update_is_the_dense_one(request, model, options):
    if model == "tied_model" and "target_modules" in options:
        pytest.skip("peft warns against adapters on one end of a tied pair")
    path, batch = request.getfixturevalue(model), grpo_batch()
    targets = options.get("target_modules", ["all-linear"])
    dense = lora_engine(DensePPOActor, path, target_modules=targets)
    ours = lora_engine(DTAPPOActor, path, **options)
    torch.testing.assert_close(
        labelled(ours.forward_batch(batch), batch),
        labelled(dense.forward_batch(batch), batch),
        rtol=0,
        atol=1e-5,
    )
    before = parameters(ours)
    actual, expected = train_once(ours, batch), train_once(dense, batch)
    assert all("lora_" in name for name in actual["gradients"])
    assert relative_error(actual["gradients"], expected["gradients"]) <= FP32
    assert relative_error(actual["parameters"], expected["parameters"]) <= FP32
    changed = {
        name for name, p in before.items() if not p.equal(actual["parameters"][name])
    }
    assert changed == actual["gradients"].keys()
    norms = actual["result"]["grad_norm"], expected["result"]["grad_norm"]
    assert norms[0] == pytest.approx(norms[1], rel=FP32)


def test_the_exported_adapter_loads_in_peft(tiny_model, tmp_path):
    """What a rollout server that serves adapters is given."""
    batch = grpo_batch()
    engine = lora_engine(DTAPPOActor, tiny_model)
    train_once(engine, batch)
    engine.save(SaveLoadMeta(str(tmp_path), "hf", False, engine.tokenizer, None))
    assert (tmp_path / "adapter_model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    plain = PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        mask = batch["attention_mask"].long()
        logits = plain(input_ids=batch["input_ids"], attention_mask=mask).logits
    labels = batch["input_ids"].roll(-1, -1)[..., None]
    expected = logits.log_softmax(-1).gather(-1, labels).squeeze(-1)
    torch.testing.assert_close(
        labelled(engine.forward_batch(batch), batch),
        labelled(expected, batch),
        rtol=0,
        atol=1e-5,
    )
