"""DPO and reward models on the tree engine: pairs under one loss."""

import copy
from types import SimpleNamespace

import pytest
import torch
from areal.api.cli_args import DPOEngineConfig, MicroBatchSpec, TrainEngineConfig
from areal.engine.fsdp_engine import FSDPRWEngine
from areal.utils.data import make_dummy_eval_item

from areal_dta.engine import DenseDPOEngine, DenseRWEngine, DTADPOEngine, DTARWEngine
from tests.engine.builders import (
    build_engine,
    engine_config,
    gradients,
    relative_error,
    value_config,
)
from tests.engine.checks import FP32, assert_same_statistics
from tests.engine.two_rank_data import pair_items

pytestmark = pytest.mark.usefixtures("world")

SPECS = [MicroBatchSpec(), MicroBatchSpec(n_mbs=2), MicroBatchSpec(granularity=2)]
OPTIONS = {"block_tokens": 5, "retain_tokens": 9}


def dpo(engine_class, model, **overrides):
    config = engine_config(DPOEngineConfig, model, **overrides)
    return build_engine(engine_class, config)


def dta_dpo(model, **overrides):
    return dpo(DTADPOEngine, model, dta=SimpleNamespace(**OPTIONS), **overrides)


def reward(engine_class, model, **overrides):
    config = value_config(TrainEngineConfig, model, **overrides)
    return build_engine(engine_class, config)


def dta_reward(model, **overrides):
    return reward(DTARWEngine, model, dta=SimpleNamespace(**OPTIONS), **overrides)


def dpo_step(engine, items):
    """Run a step as AReaL's trainer: the reference gives its logprobs first."""
    items = copy.deepcopy(items)
    for item, logp in zip(items, engine.compute_logp(items), strict=True):
        noise = torch.sin(torch.arange(logp.numel()).reshape(logp.shape))
        item["ref_logprobs"] = logp + 0.3 * noise
    engine.train_dpo(items)
    return {"gradients": gradients(engine), "stats": engine.export_stats()}


def rw_step(engine, items):
    engine.train_rw(copy.deepcopy(items))
    found = gradients(engine)
    assert found.pop("score.bias").abs() < 1e-6  # differences of scores have none
    return {"gradients": found, "stats": engine.export_stats()}


def assert_same_step(actual, expected):
    assert relative_error(actual["gradients"], expected["gradients"]) <= FP32
    assert_same_statistics(actual, expected)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_train_dpo(tiny_model, spec, loss_type):
    options = {"mb_spec": spec, "loss_type": loss_type, "beta": 0.4}
    expected = dpo_step(dpo(DenseDPOEngine, tiny_model, **options), pair_items())
    engine = dta_dpo(tiny_model, **options)
    assert_same_step(dpo_step(engine, pair_items()), expected)
    num_masked = sum(int(item["loss_mask"].sum()) for item in pair_items())
    assert 0 < engine.runner.executor.last_stats.num_rows <= num_masked


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_train_rw(tiny_critic, spec):
    expected = rw_step(
        reward(DenseRWEngine, tiny_critic, mb_spec=spec), pair_items(False)
    )
    engine = dta_reward(tiny_critic, mb_spec=spec)
    assert_same_step(rw_step(engine, pair_items(False)), expected)
    assert engine.runner.executor.last_stats.num_rows <= len(pair_items())


@pytest.mark.parametrize("kind", ["dpo", "rw"])
def test_evaluation_with_the_rows_that_areal_pads_with(tiny_model, tiny_critic, kind):
    """AReaL's controller fills its ranks with pairs without a token."""
    items = pair_items(kind == "dpo")
    if kind == "dpo":
        engines = [dpo(DenseDPOEngine, tiny_model), dta_dpo(tiny_model)]
        for item in items:
            item["ref_logprobs"] = torch.zeros(item["input_ids"].shape)
    else:
        engines = [reward(DenseRWEngine, tiny_critic), dta_reward(tiny_critic)]
    padded = items + [make_dummy_eval_item(items[0])] * 2
    found = []
    for engine, rows in zip(engines, (items, padded), strict=True):
        getattr(engine, f"evaluate_{kind}")(copy.deepcopy(rows))
        found.append({"stats": engine.export_stats()})
    assert_same_statistics(found[1], found[0])
    assert found[1]["stats"][f"{kind}-eval/n_pairs"] == len(items) // 2


def test_a_pair_with_an_empty_row_counts_for_nothing(tiny_model, tiny_critic):
    """And the others stay pairs."""
    items = pair_items()
    items[5]["attention_mask"][:] = False
    engines = dpo(DenseDPOEngine, tiny_model), dta_dpo(tiny_model)
    expected, actual = (dpo_step(engine, items) for engine in engines)
    assert_same_step(actual, expected)
    assert actual["stats"]["dpo/n_pairs"] == len(items) // 2 - 1
    engines = reward(DenseRWEngine, tiny_critic), dta_reward(tiny_critic)
    expected, actual = (rw_step(engine, items) for engine in engines)
    assert_same_step(actual, expected)


def test_an_odd_row_is_refused(tiny_model):
    items = pair_items()[:3]
    with pytest.raises(ValueError, match="3 rows on this rank; expected a multiple"):
        dta_dpo(tiny_model).compute_logp(items)


def test_pairs_cannot_be_split(tiny_model):
    engine = dta_dpo(tiny_model)
    engine.config.dta = SimpleNamespace(**OPTIONS, loss_scope="sequence")
    with pytest.raises(ValueError, match="loss_scope=sequence"):
        dpo_step(engine, pair_items())


def test_areal_s_reward_engine_still_needs_our_corrections(tiny_critic):
    """When this fails, engine/pair_rewards.py can go."""
    with pytest.raises(KeyError, match="cu_seqlens"):
        reward(FSDPRWEngine, tiny_critic).train_rw(pair_items(False))


def test_controllers_keep_pairs_on_a_rank(tiny_model, tiny_critic, monkeypatch):
    from areal.trainer.dpo.dpo_engine import DPOController

    config = engine_config(DPOEngineConfig, tiny_model, backend="fsdp:d2")
    assert type(DTADPOEngine.as_controller(config, None)) is DPOController
    config = value_config(TrainEngineConfig, tiny_critic, backend="fsdp:d2")
    calls = []
    for engine_class in (DTARWEngine, DenseRWEngine):
        controller = engine_class.as_controller(config, None)
        assert controller.train_engine is engine_class
        monkeypatch.setattr(
            controller,
            "_custom_function_call",
            lambda *args, **kwargs: calls.append((args, kwargs)),
        )
        controller.train_rw([{}])
    assert [kwargs["group_size"] for _, kwargs in calls] == [2, 2]
