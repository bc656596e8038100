"""What is known of AReaL's losses, and the scope that follows."""

import functools

import pytest
from areal.trainer.dpo.dpo_engine import compute_dpo_loss
from areal.trainer.ppo.actor import grpo_loss_fn
from areal.trainer.ppo.critic import ppo_loss_fn
from areal.trainer.rw.rw_engine import compute_rw_loss
from areal.trainer.sft.lm_engine import compute_packed_sft_loss

from areal_dta.engine.batch import Alignment, OutputRule
from areal_dta.engine.loss import choose_scope, traits_of, with_own_prox_logp

LABELS = OutputRule(Alignment.OUTPUT)


def my_loss(logprobs, entropy, mb_input, **kwargs):
    return logprobs.sum()


@pytest.mark.parametrize(
    "loss_fn, needed, scope",
    [
        (grpo_loss_fn, LABELS, "sequence"),
        (functools.partial(grpo_loss_fn, use_sapo_loss=True), LABELS, "sequence"),
        (functools.partial(grpo_loss_fn, m2_threshold=None), LABELS, "sequence"),
        (functools.partial(grpo_loss_fn, m2_threshold=0.1), LABELS, "batch"),
        (ppo_loss_fn, LABELS, "sequence"),
        (compute_packed_sft_loss, LABELS, "batch"),
        (compute_dpo_loss, OutputRule(Alignment.TOKEN), "batch"),
        (compute_rw_loss, OutputRule(None, last=True), "batch"),
        (my_loss, None, "batch"),
        (lambda *args, **kwargs: None, None, "batch"),
    ],
)
def test_each_loss_gets_what_is_exact(loss_fn, needed, scope):
    traits = traits_of(loss_fn)
    assert traits.needed_outputs == needed
    assert choose_scope(traits, "auto") == scope
    assert choose_scope(traits, "batch") == "batch"


def test_losses_are_known_in_any_wrapping():
    inner = functools.partial(grpo_loss_fn, m2_threshold=0.1, eps_clip=0.2)
    outer = functools.partial(with_own_prox_logp(inner), c_clip=None)
    assert traits_of(outer) == traits_of(inner) != traits_of(grpo_loss_fn)
    undone = functools.partial(inner, m2_threshold=None)
    assert traits_of(undone) == traits_of(grpo_loss_fn)


def test_a_scope_can_be_asked_for_where_it_is_possible():
    for loss_fn in (my_loss, compute_packed_sft_loss):
        assert choose_scope(traits_of(loss_fn), "sequence") == "sequence"
    for loss_fn in (
        compute_dpo_loss,
        compute_rw_loss,
        functools.partial(grpo_loss_fn, m2_threshold=0.1),
    ):
        with pytest.raises(ValueError, match="loss_scope=sequence.*whole micro-batch"):
            choose_scope(traits_of(loss_fn), "sequence")
