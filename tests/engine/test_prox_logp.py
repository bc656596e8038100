"""The proximal logprobs for free: the same update as with a pass of their own."""

from types import SimpleNamespace

import pytest
from areal.api.cli_args import MicroBatchSpec, RejectionSamplingConfig

from areal_dta.config.engine_options import DTAOptions, fuses_prox_logp
from areal_dta.engine import DTAPPOActor
from tests.engine.builders import actor_config, build_engine, gradients, relative_error
from tests.engine.checks import FP32, assert_same_statistics
from tests.engine.two_rank_data import trajectories


def actor(model, fuse="auto", **overrides):
    dta = SimpleNamespace(block_tokens=4, retain_tokens=6, fuse_prox_logp=fuse)
    return build_engine(DTAPPOActor, actor_config(model, dta=dta, **overrides))


def step(engine, with_pass):
    items = trajectories()
    if with_pass:
        logp = engine.compute_logp(items)
        for item, values in zip(items, logp, strict=True):
            item["prox_logp"] = values
    engine.ppo_update(engine.compute_advantages(items))
    return {"gradients": gradients(engine), "stats": engine.export_stats()}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rejection_sampling": RejectionSamplingConfig(upper=1.2, lower=0.8)},
        {"prox_logp_method": "metrics"},
        {"importance_sampling_level": "sequence", "mb_spec": MicroBatchSpec(n_mbs=3)},
        {"m2_threshold": 0.05, "mb_spec": MicroBatchSpec(n_mbs=2)},
        {"temperature": 0.7, "eps_clip_higher": 0.3, "c_clip": 3.0},
    ],
    ids=lambda o: next(iter(o), "plain"),
)
def test_fused_equals_unfused(tiny_model, options):
    assert fuses_prox_logp(actor_config(tiny_model, **options))
    expected = step(actor(tiny_model, **options), with_pass=True)
    actual = step(actor(tiny_model, **options), with_pass=False)
    assert relative_error(actual["gradients"], expected["gradients"]) <= FP32
    assert_same_statistics(actual, expected)
    loss = "dta/loss"
    assert actual["stats"][loss] == pytest.approx(expected["stats"][loss], abs=1e-6)
    update = "ppo_actor/update"
    assert f"{update}/compute_logp/prox_logp_gt/avg" in actual["stats"]
    assert actual["stats"][f"{update}/importance_weight/max"] == 1
    assert actual["stats"][f"{update}/approx_kl/avg"] == 0


@pytest.mark.usefixtures("world")
def test_given_prox_logp_is_used(tiny_model):
    """A trainer that made the pass is not overruled."""
    engine = actor(tiny_model)
    items = engine.compute_advantages(trajectories())
    for item in items:
        item["prox_logp"] = item["logprobs"].clone()
    engine.ppo_update(items)
    assert engine.export_stats()["ppo_actor/update/importance_weight/avg"] != 1


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "options",
    [{"fuse": "false"}, {"fuse": False}, {"ppo_n_minibatches": 2}],
    ids=str,
)
def test_where_the_conditions_do_not_hold_areal_decides(tiny_model, options):
    with pytest.raises(ValueError, match="prox_logp is None"):
        step(actor(tiny_model, **options), with_pass=False)
    step(actor(tiny_model, **options), with_pass=True)


@pytest.mark.parametrize(
    "overrides, fuses",
    [
        ({}, True),
        ({"prox_logp_method": "metrics"}, True),
        ({"prox_logp_method": "loglinear"}, False),
        ({"ppo_n_minibatches": 2}, False),
        ({"use_decoupled_loss": False}, False),
        ({"use_decoupled_loss": False, "recompute_logprob": True}, False),
        ({"dta": SimpleNamespace(fuse_prox_logp="auto")}, True),
        ({"dta": SimpleNamespace(fuse_prox_logp=False)}, False),
        ({"dta": SimpleNamespace(block_tokens=4)}, True),
    ],
    ids=str,
)
def test_conditions(tmp_path, overrides, fuses):
    assert fuses_prox_logp(actor_config(tmp_path, **overrides)) is fuses


def test_unknown_choice():
    with pytest.raises(ValueError, match="fuse_prox_logp=yes; expected auto or false"):
        DTAOptions(fuse_prox_logp="yes")
