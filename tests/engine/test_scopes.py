"""Every actor loss of AReaL in both scopes, against AReaL's own micro-batches."""

from types import SimpleNamespace

import pytest
import torch
from areal.api.cli_args import MicroBatchSpec, RejectionSamplingConfig

from areal_dta.engine import DensePPOActor, DTAPPOActor
from tests.engine.builders import (
    actor_config,
    build_engine,
    grpo_batch,
    relative_error,
)
from tests.engine.checks import (
    assert_same_statistics,
    assert_same_update,
    grpo_loss,
    loss_tokens,
    train_once,
)

pytestmark = pytest.mark.usefixtures("world")

PLAIN = {"rejection_sampling": None}
LOSSES = {
    "ppo": PLAIN | {"use_decoupled_loss": False},
    "decoupled": {},
    "gspo": PLAIN | {"importance_sampling_level": "sequence"},
    "sapo": PLAIN | {"use_decoupled_loss": False, "use_sapo_loss": True},
    "sapo-sequence": PLAIN
    | {
        "use_decoupled_loss": False,
        "use_sapo_loss": True,
        "importance_sampling_level": "sequence",
    },
    "reject-sequences": {
        "rejection_sampling": RejectionSamplingConfig(
            level="sequence", upper=1.02, lower=0.9
        )
    },
    "reject-by-kl": {
        "rejection_sampling": RejectionSamplingConfig(
            level="sequence", metric="kl_k2", agg="sum", upper=0.3
        )
    },
    "clamp-sequences": {
        "rejection_sampling": RejectionSamplingConfig(
            level="sequence", action="clamp", agg="max", upper=1.3
        )
    },
}
TEACHERS = {"distillation": 0.7, "pure-distillation": 0.0}  # rl_loss_weight
TWO = MicroBatchSpec(n_mbs=2)


def tree(model, scope="auto", **overrides):
    dta = SimpleNamespace(block_tokens=5, retain_tokens=9, loss_scope=scope)
    return build_engine(DTAPPOActor, actor_config(model, dta=dta, **overrides))


def dense(model, **overrides):
    return build_engine(DensePPOActor, actor_config(model, **overrides))


def taught(batch, rl_loss_weight):
    noise = torch.randn(
        batch["logprobs"].shape, generator=torch.Generator().manual_seed(3)
    )
    return batch | {
        "teacher_logp": (-4 + 0.3 * noise) * batch["loss_mask"],
        "rl_loss_weight": rl_loss_weight,
        "distill_loss_weight": 0.3,
    }


@pytest.fixture(scope="module")
def expected(tiny_model, world):
    """One dense update a loss, in two micro-batches."""
    updates = {
        name: train_once(
            dense(tiny_model, mb_spec=TWO), grpo_batch(), grpo_loss(**options)
        )
        for name, options in LOSSES.items()
    }
    for name, weight in TEACHERS.items():
        batch = taught(grpo_batch(), weight)
        updates[name] = train_once(dense(tiny_model, mb_spec=TWO), batch)
    return updates


@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("name", [*LOSSES, *TEACHERS])
def test_actor_losses(tiny_model, expected, name, scope):
    batch = grpo_batch()
    if name in TEACHERS:
        batch = taught(batch, TEACHERS[name])
    loss_fn = grpo_loss(**LOSSES.get(name, {}))
    actual = train_once(tree(tiny_model, scope, mb_spec=TWO), batch, loss_fn)
    assert_same_update(actual, expected[name])
    assert_same_statistics(actual, expected[name])


def test_the_losses_differ(expected):
    """So that the parity above is one of many losses, not of one."""
    names = list(expected)
    for i, name in enumerate(names):
        for other in names[:i]:
            gradients = expected[name]["gradients"], expected[other]["gradients"]
            assert relative_error(*gradients) > 1e-3, (name, other)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_m2po_masks_within_a_micro_batch(tiny_model, num_micro_batches):
    spec = MicroBatchSpec(n_mbs=num_micro_batches)
    batch = grpo_batch()
    loss_fn = grpo_loss(m2_threshold=0.02, rejection_sampling=None)
    theirs = train_once(dense(tiny_model, mb_spec=spec), batch, loss_fn)
    assert theirs["stats"]["n_valid_tokens"] < batch["loss_mask"].sum()
    ours = train_once(tree(tiny_model, mb_spec=spec, m2_threshold=0.02), batch, loss_fn)
    assert_same_update(ours, theirs)
    assert_same_statistics(ours, theirs)


def test_any_loss_and_weight_in_the_batch_scope(tiny_model):
    """One that is no sum over sequences, with a weight that is none either."""

    def spread(logprobs, entropy, mb_input, **kwargs):
        mask = mb_input["loss_mask"].bool()
        return logprobs[mask].std() * entropy[mask].mean()

    def one(mb_input):
        return torch.ones(())

    batch = grpo_batch()
    theirs = train_once(dense(tiny_model, mb_spec=TWO), batch, spread, one)
    assert_same_update(
        train_once(tree(tiny_model, mb_spec=TWO), batch, spread, one), theirs
    )


def test_evaluation_is_areal_s_too(tiny_model):
    batch, loss_fn = grpo_batch(), grpo_loss(m2_threshold=0.02)
    engines = dense(tiny_model, mb_spec=TWO), tree(tiny_model, mb_spec=TWO)
    theirs, ours = (e.eval_batch(batch, loss_fn, loss_tokens) for e in engines)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_the_first_pass_is_counted(tiny_model):
    sequence, batch = (
        train_once(tree(tiny_model, scope), grpo_batch())["stats"]
        for scope in ("sequence", "batch")
    )
    tokens = "dta/computed_tokens"
    assert sequence[tokens] < batch[tokens] <= 2 * sequence[tokens]
    assert batch["dta/predicted_saving"] < sequence["dta/predicted_saving"]
    assert batch["dta/tree_tokens"] == sequence["dta/tree_tokens"]
