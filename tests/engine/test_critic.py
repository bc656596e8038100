"""AReaL's critic on the tree engine, alone and in a whole step of PPO."""

import copy
from types import SimpleNamespace

import pytest
import torch
from areal.api.cli_args import MicroBatchSpec, PPOCriticConfig
from areal.engine.fsdp_engine import FSDPPPOActor

from areal_dta.engine import DensePPOCritic, DTAPPOCritic
from areal_dta.engine.setting_checks import option
from tests.engine.builders import (
    actor_config,
    build_engine,
    parameters,
    relative_error,
    rows_of,
    value_config,
)
from tests.engine.checks import FP32, assert_same_statistics
from tests.engine.two_rank_data import trajectories

pytestmark = pytest.mark.usefixtures("world")


def critic(model, positions="auto", scope="auto", **overrides):
    dta = SimpleNamespace(
        block_tokens=4, retain_tokens=6, positions=positions, loss_scope=scope
    )
    config = value_config(PPOCriticConfig, model, dta=dta, **overrides)
    return build_engine(DTAPPOCritic, config)


def dense(model, **overrides):
    config = value_config(PPOCriticConfig, model, **overrides)
    return build_engine(DensePPOCritic, config)


def with_advantages(items, values, tiny_model):
    """Do what the trainer does between the two calls of the critic."""
    items = copy.deepcopy(items)
    for item, of_item in zip(items, values, strict=True):
        item["values"] = of_item
    actor = FSDPPPOActor(actor_config(tiny_model, discount=0.9, gae_lambda=0.8))
    return actor.compute_advantages(items)


def update(engine, items):
    engine.ppo_update(copy.deepcopy(items))
    return {"parameters": parameters(engine), "stats": engine.export_stats()}


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_values_everywhere(tiny_critic, num_micro_batches):
    spec = MicroBatchSpec(n_mbs=num_micro_batches)
    items = trajectories()
    expected = dense(tiny_critic, mb_spec=spec).compute_values(items)
    engine = critic(tiny_critic, "all", mb_spec=spec)
    assert not option(engine.config, "positions") == "auto"
    for actual, theirs, item in zip(
        engine.compute_values(items), expected, items, strict=True
    ):
        assert actual.shape == item["input_ids"].shape
        torch.testing.assert_close(actual, theirs, rtol=1e-5, atol=1e-5)


def test_advantages_need_no_other_values(tiny_critic, tiny_model):
    """A sequence that fills its width has no end: GAE goes on from its last value."""
    items = trajectories()
    assert all(item["attention_mask"].all(-1).any() for item in items)
    engine, everywhere = critic(tiny_critic), critic(tiny_critic, "all")
    few, all_values = (e.compute_values(items) for e in (engine, everywhere))
    num_rows = engine.runner.executor.last_stats.num_rows
    assert num_rows < everywhere.runner.executor.last_stats.num_rows
    ours, theirs = (
        with_advantages(items, values, tiny_model) for values in (few, all_values)
    )
    for actual, expected in zip(ours, theirs, strict=True):
        for key in ("advantages", "returns"):
            mask = expected["loss_mask"].bool()
            torch.testing.assert_close(actual[key][mask], expected[key][mask])
            assert expected[key][mask].std() > 0.01


@pytest.mark.parametrize("scope", ["auto", "batch"])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_update(tiny_critic, tiny_model, scope, num_minibatches):
    options = {"ppo_n_minibatches": num_minibatches, "eps_clip": 0.05}
    reference = dense(tiny_critic, mb_spec=MicroBatchSpec(n_mbs=2), **options)
    values = reference.compute_values(trajectories())
    stale = [v + 0.1 * torch.sin(7 * v) for v in values]  # so that some are clipped
    items = with_advantages(trajectories(), stale, tiny_model)
    expected = update(reference, items)
    assert 0 < expected["stats"]["ppo_critic/clip_ratio/avg"] < 1
    engine = critic(
        tiny_critic, scope=scope, mb_spec=MicroBatchSpec(n_mbs=2), **options
    )
    actual = update(engine, items)
    assert relative_error(actual["parameters"], expected["parameters"]) <= FP32
    assert_same_statistics(actual, expected)


def test_only_loss_positions_are_trained(tiny_critic, tiny_model):
    engine = critic(tiny_critic)
    items = with_advantages(
        trajectories(), engine.compute_values(trajectories()), tiny_model
    )
    update(engine, items)
    num_masked = sum(int(item["loss_mask"].sum()) for item in items)
    assert 0 < engine.runner.executor.last_stats.num_rows <= num_masked


def test_a_sequence_of_one_token(tiny_critic):
    """It has no loss, and is passed to AReaL's loss for the statistics alone."""
    items = [rows_of(trajectories()[0], [row]) for row in (0, 1)]
    items[1] = {k: v[:, :1] if v.ndim > 1 else v for k, v in items[1].items()}
    engine = critic(tiny_critic)
    for item in items:
        item["values"] = item["returns"] = item["loss_mask"].float()
    engine.ppo_update(items)
    assert engine.export_stats()["ppo_critic/n_tokens"] == sum(
        int(item["attention_mask"].sum()) for item in items
    )


def test_as_controller_is_areal_s_own(tiny_critic):
    from areal.trainer.ppo.critic import PPOCriticController

    config = value_config(PPOCriticConfig, tiny_critic, backend="fsdp:d1")
    controller = DTAPPOCritic.as_controller(config, None)
    assert isinstance(controller, PPOCriticController)
    assert controller.train_engine is DTAPPOCritic
