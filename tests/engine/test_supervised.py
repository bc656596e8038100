"""AReaL's supervised fine-tuning on the tree engine."""

import copy
from types import SimpleNamespace

import pytest
from areal.api.cli_args import MicroBatchSpec, TrainEngineConfig

from areal_dta.engine import DenseLMEngine, DTALMEngine
from tests.engine.builders import (
    build_engine,
    engine_config,
    gradients,
    relative_error,
)
from tests.engine.checks import FP32, assert_same_statistics
from tests.engine.two_rank_data import lm_items

pytestmark = pytest.mark.usefixtures("world")


def train(engine, items):
    engine.train_lm(copy.deepcopy(items))
    return {"gradients": gradients(engine), "stats": engine.export_stats()}


def tree(model, scope="auto", **overrides):
    dta = SimpleNamespace(block_tokens=5, retain_tokens=9, loss_scope=scope)
    config = engine_config(TrainEngineConfig, model, dta=dta, **overrides)
    return build_engine(DTALMEngine, config)


def dense(model, **overrides):
    config = engine_config(TrainEngineConfig, model, **overrides)
    return build_engine(DenseLMEngine, config)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_train_lm(tiny_model, num_micro_batches):
    spec = MicroBatchSpec(n_mbs=num_micro_batches)
    expected = train(dense(tiny_model, mb_spec=spec), lm_items())
    engine = tree(tiny_model, mb_spec=spec)
    actual = train(engine, lm_items())
    assert relative_error(actual["gradients"], expected["gradients"]) <= FP32
    assert_same_statistics(actual, expected)
    num_masked = sum(int(item["loss_mask"].sum()) for item in lm_items())
    assert 0 < engine.runner.executor.last_stats.num_rows <= num_masked


def test_the_sequence_scope_is_nearly_right_and_can_be_asked_for(tiny_model):
    expected = train(dense(tiny_model), lm_items())
    actual = train(tree(tiny_model, "sequence"), lm_items())
    assert relative_error(actual["gradients"], expected["gradients"]) <= 2e-5


def test_evaluate_lm(tiny_model):
    engines = dense(tiny_model), tree(tiny_model)
    expected, actual = [], []
    for engine, found in zip(engines, (expected, actual), strict=True):
        engine.evaluate_lm(lm_items())
        found.append(engine.export_stats())
    assert_same_statistics({"stats": actual[0]}, {"stats": expected[0]})
    assert actual[0]["sft-eval/loss/avg"] > 1


def test_as_controller_is_areal_s_own(tiny_model):
    from areal.trainer.sft.lm_engine import LMController

    config = engine_config(TrainEngineConfig, tiny_model, backend="fsdp:d2")
    controller = DTALMEngine.as_controller(config, None)
    assert type(controller) is LMController
    assert controller.train_engine is DTALMEngine
