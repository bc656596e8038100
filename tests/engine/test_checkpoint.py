"""Checkpoints are AReaL's: each engine loads the other's, and Transformers both."""

import pytest
import torch
from areal.api import SaveLoadMeta
from areal.api.cli_args import OptimizerConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_dta.engine import DensePPOActor, DTAPPOActor
from tests.engine.builders import (
    actor_config,
    build_engine,
    full,
    grpo_batch,
    parameters,
    relative_error,
)
from tests.engine.checks import labelled, train_once

pytestmark = pytest.mark.usefixtures("world")

ADAM = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)


@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
@pytest.mark.parametrize(
    "saver, loader",
    [(DTAPPOActor, DensePPOActor), (DensePPOActor, DTAPPOActor)],
    ids=["tree to dense", "dense to tree"],
)
@pytest.mark.parametrize("model", ["tiny_model", "tied_model"])
def test_the_other_engine_goes_on(
    request, tmp_path, model, saver, loader, weight_format
):
    """Optimizer state included: the next update is the same in both."""
    path, batch = request.getfixturevalue(model), grpo_batch()
    meta = SaveLoadMeta(str(tmp_path), weight_format, True, None, None)
    first = build_engine(saver, actor_config(path, optimizer=ADAM))
    train_once(first, batch)
    first.save(meta)
    second = build_engine(loader, actor_config(path, optimizer=ADAM))
    second.load(meta)
    assert relative_error(parameters(second), parameters(first)) == 0
    state, loaded = (
        [full(s["exp_avg"]) for s in engine.optimizer.state.values()]
        for engine in (first, second)
    )
    assert len(state) == len(loaded) > 0
    for expected, actual in zip(state, loaded, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    expected, actual = train_once(first, batch), train_once(second, batch)
    assert relative_error(actual["gradients"], expected["gradients"]) < 1e-5


@pytest.mark.parametrize("model", ["tiny_model", "tied_model"])
def test_the_export_loads_in_transformers(request, tmp_path, model):
    batch = grpo_batch()
    engine = build_engine(DTAPPOActor, actor_config(request.getfixturevalue(model)))
    train_once(engine, batch)
    engine.save(SaveLoadMeta(str(tmp_path), "hf", False, engine.tokenizer, None))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "sdpa"
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == plain.config.vocab_size
    for name, value in parameters(engine).items():
        torch.testing.assert_close(plain.get_parameter(name), value, rtol=0, atol=0)
    with torch.no_grad():
        mask = batch["attention_mask"].long()
        logits = plain(batch["input_ids"], attention_mask=mask).logits
    labels = batch["input_ids"].roll(-1, -1)[..., None]
    expected = logits.log_softmax(-1).gather(-1, labels).squeeze(-1)
    torch.testing.assert_close(
        labelled(engine.forward_batch(batch), batch),
        labelled(expected, batch),
        rtol=0,
        atol=1e-5,
    )
