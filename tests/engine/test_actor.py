"""AReaL's actor on the tree engine: one whole step of GRPO, as the trainer runs it."""

import copy

import pytest
import torch
from areal.api.cli_args import MicroBatchSpec, NormConfig
from areal.engine.fsdp_engine import FSDPPPOActor

from areal_dta.engine import DensePPOActor, DTAPPOActor
from tests.engine.builders import actor_config, build_engine, relative_error
from tests.engine.two_rank_data import trajectories
from tests.engine.two_rank_updates import actor_update, tree_engine

pytestmark = pytest.mark.usefixtures("world")

GROUP_NORM = NormConfig(mean_level="group", std_level="group", group_size=3)
BATCH_NORM = NormConfig(mean_level="batch", std_level="batch", group_size=1)


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_a_whole_step_equals_areal(tiny_model, num_minibatches):
    options = {"reward_norm": GROUP_NORM, "ppo_n_minibatches": num_minibatches}
    dense = build_engine(DensePPOActor, actor_config(tiny_model, **options))
    expected = actor_update(dense, trajectories())
    actual = actor_update(tree_engine(tiny_model, **options), trajectories())
    assert relative_error(actual["parameters"], expected["parameters"]) < 1e-5
    ours = {k for k in actual["stats"] if not k.startswith("dta/")}
    theirs = {k for k in expected["stats"] if "vocab_" not in k}
    assert ours == theirs
    for key in theirs:
        assert actual["stats"][key] == pytest.approx(
            expected["stats"][key], rel=1e-3, abs=1e-4
        ), key


def test_tree_statistics_add_up_over_minibatches(tiny_model):
    one, two = (
        actor_update(tree_engine(tiny_model, ppo_n_minibatches=n), trajectories())
        for n in (1, 2)
    )
    key = "dta/sequence_tokens"
    assert two["stats"][key] == one["stats"][key]
    assert two["stats"]["dta/tree_tokens"] >= one["stats"]["dta/tree_tokens"]


@pytest.mark.parametrize("norm", [GROUP_NORM, BATCH_NORM], ids=["group", "batch"])
@pytest.mark.parametrize("field", ["reward_norm", "adv_norm"])
def test_compute_advantages_equals_areal(tiny_model, norm, field):
    config = actor_config(tiny_model, **{field: norm})
    items = trajectories()
    stock = FSDPPPOActor(config).compute_advantages(copy.deepcopy(items))
    ours = DTAPPOActor(config).compute_advantages(copy.deepcopy(items))
    for actual, expected in zip(ours, stock, strict=True):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, rtol=0, atol=0)
    spread = torch.cat([x["advantages"].flatten() for x in ours])
    assert spread.std() > 0.1


def test_compute_logp_of_each_trajectory(tiny_model):
    engine = tree_engine(tiny_model, mb_spec=MicroBatchSpec(n_mbs=4))
    items = trajectories()
    outputs = engine.compute_logp(items)
    assert [x.shape for x in outputs] == [x["input_ids"].shape for x in items]
    assert not engine.model.training and all(x.isfinite().all() for x in outputs)


def test_areal_s_second_controllers_are_refused(tiny_model):
    config = actor_config(tiny_model)
    config._version = "v2"
    with pytest.raises(ValueError, match="_version=v1"):
        DTAPPOActor.as_controller(config, scheduler=None)
