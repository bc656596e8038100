"""What is known of AReaL's loss functions: what they read, and whether they add up.

The loss of a micro-batch *adds up* if, weighted as AReaL weighs it, it is the sum of
the losses of any parts of it, down to single sequences. Then each part is evaluated
when the tree is left below it (scope ``sequence``). Otherwise all outputs are collected
first, by one more forward, and the loss is called once a micro-batch on all of its
rows, as AReaL calls it (scope ``batch``): exact for any loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from areal_dta.engine.positions import Alignment, ReadRule

SCOPES = ("sequence", "batch")


@dataclass(frozen=True, slots=True)
class LossTraits:
    reads: ReadRule | None
    """The outputs that can change the loss; None: all."""
    adds_up: bool
    can_split: bool
    """Whether parts of a micro-batch can be evaluated at all, if only nearly right."""


_UNKNOWN = LossTraits(reads=None, adds_up=False, can_split=True)


def _grpo(options: dict[str, Any]) -> LossTraits:
    """PPO, GRPO, GSPO, SAPO, rejection sampling at either level, distillation: sums
    over tokens or sequences, divided by the loss tokens. M2PO chooses its mask among
    the tokens of the micro-batch."""
    adds_up = options.get("m2_threshold") is None
    return LossTraits(ReadRule(Alignment.OUTPUT), adds_up, can_split=adds_up)


def _critic(options: dict[str, Any]) -> LossTraits:
    return LossTraits(ReadRule(Alignment.OUTPUT), adds_up=True, can_split=True)


def _sft(options: dict[str, Any]) -> LossTraits:
    """Divides by 1e-5 + count, so parts differ by 1e-5 / count."""
    return LossTraits(ReadRule(Alignment.OUTPUT), adds_up=False, can_split=True)


def _dpo(options: dict[str, Any]) -> LossTraits:
    return LossTraits(ReadRule(Alignment.TOKEN), adds_up=False, can_split=False)


def _reward(options: dict[str, Any]) -> LossTraits:
    return LossTraits(ReadRule(None, last=True), adds_up=False, can_split=False)


# By where they are defined, so that a module is not imported to be compared with.
_KNOWN: dict[tuple[str, str], Callable[[dict[str, Any]], LossTraits]] = {
    ("areal.trainer.ppo.actor", "grpo_loss_fn"): _grpo,
    ("areal.trainer.ppo.critic", "ppo_loss_fn"): _critic,
    ("areal.trainer.sft.lm_engine", "compute_packed_sft_loss"): _sft,
    ("areal.trainer.dpo.dpo_engine", "compute_dpo_loss"): _dpo,
    ("areal.trainer.rw.rw_engine", "compute_rw_loss"): _reward,
}


def traits_of(loss_fn: Callable[..., Any]) -> LossTraits:
    """Of a loss function, also inside ``functools.partial`` and ``functools.wraps``.

    One that is not AReaL's may read anything and need not add up.
    """
    inner: Any = loss_fn
    options: dict[str, Any] = {}
    while True:
        if isinstance(inner, functools.partial):
            options = {**inner.keywords, **options}  # the outer one wins
            inner = inner.func
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            break
    key = getattr(inner, "__module__", ""), getattr(inner, "__name__", "")
    return _KNOWN[key](options) if key in _KNOWN else _UNKNOWN


def choose_scope(traits: LossTraits, option: str) -> str:
    """``option``: ``dta.loss_scope``, where ``auto`` takes what is exact.

    Raises:
        ValueError: the option is unknown, or not possible with this loss.
    """
    if option == "auto":
        return "sequence" if traits.adds_up else "batch"
    if option not in SCOPES:
        raise ValueError(f"dta.loss_scope={option}; expected auto, sequence or batch")
    if option == "sequence" and not traits.can_split:
        raise ValueError(
            "dta.loss_scope=sequence: this loss is one of whole micro-batches (of "
            "pairs, or with a mask chosen among all tokens); set it to auto or batch"
        )
    return option
