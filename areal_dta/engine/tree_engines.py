"""The tree engine under each of AReaL's algorithms: actor, critic, SFT, DPO, reward.

Each class has three of ours over AReaL's at most: itself, `RowDispatch` for PPO, and
`DTAEngine`. The algorithms are AReaL's own; they stand on ``train_batch``,
``eval_batch`` and ``forward_batch``, which are `DTAEngine`'s. All their methods are
collective, and may be called with no rows on some of the ranks.
"""

from __future__ import annotations

import functools
from typing import Any

from areal.engine.fsdp_engine import (
    FSDPDPOEngine,
    FSDPLMEngine,
    FSDPPPOActor,
    FSDPPPOCritic,
)
from torch import Tensor

from areal_dta.areal_fixes.training_engines import PairRewards
from areal_dta.config.engine_options import fuses_prox_logp
from areal_dta.engine.batch import Alignment, BatchInput, OutputRule
from areal_dta.engine.dta_engine import DTAEngine
from areal_dta.engine.loss import LossFn, with_own_prox_logp
from areal_dta.engine.placeholder_rows import call_with_some_rows
from areal_dta.engine.row_dispatch import RowDispatch
from areal_dta.engine.row_share import Item

_PAIR = 2  # consecutive rows, the chosen one first; always on one rank


class DTAPPOActor(RowDispatch, DTAEngine, FSDPPPOActor):
    """PPO actor; also the reference and a teacher, which only ``compute_logp``.

    Trajectories without ``prox_logp`` are trained on their own logprobs where that is
    the same (`fuses_prox_logp`).
    """

    def compute_logp(self, *args: Any, **kwargs: Any) -> Any:
        """Return logprobs where the (token-aligned) loss mask is set, 0 elsewhere:
        AReaL masks whatever it does with them."""
        with self.forward_needs_only(OutputRule(Alignment.TOKEN)):
            return super().compute_logp(*args, **kwargs)

    def wrap_loss(self, loss_fn: LossFn, input_: BatchInput) -> LossFn:
        rows = input_ if isinstance(input_, dict) else next(iter(input_), {})
        if fuses_prox_logp(self.config) and "prox_logp" not in rows:
            return with_own_prox_logp(loss_fn)
        return loss_fn


class DTAPPOCritic(RowDispatch, DTAEngine, FSDPPPOCritic):
    """PPO critic."""

    trains_values = True

    def compute_values(self, *args: Any, **kwargs: Any) -> Any:
        """Return values before each token whose (token-aligned) loss mask is set, and
        at each sequence's last token, from which GAE bootstraps; 0 elsewhere."""
        with self.forward_needs_only(OutputRule(Alignment.TOKEN, last=True)):
            return super().compute_values(*args, **kwargs)

    def wrap_loss(self, loss_fn: LossFn, input_: BatchInput) -> LossFn:
        # AReaL's loss squeezes its values, and one token must stay one.
        @functools.wraps(loss_fn)
        def on_columns(values: Tensor, mb_input: dict[str, Any]) -> Tensor:
            return loss_fn(values[:, None], mb_input)

        return on_columns


class DTALMEngine(DTAEngine, FSDPLMEngine):
    """Supervised fine-tuning."""

    def train_lm(self, data: list[Item]) -> None:
        call_with_some_rows(self, super().train_lm, data)

    def evaluate_lm(self, data: list[Item]) -> None:
        call_with_some_rows(self, super().evaluate_lm, data)


class DTADPOEngine(DTAEngine, FSDPDPOEngine):
    """DPO; also its own reference, of which only ``compute_logp`` is called."""

    def train_dpo(self, data: list[Item]) -> None:
        call_with_some_rows(self, super().train_dpo, data, _PAIR)

    def evaluate_dpo(self, data: list[Item]) -> None:
        call_with_some_rows(self, super().evaluate_dpo, data, _PAIR)

    def compute_logp(self, data: list[Item]) -> Any:
        """Return logprobs where the (token-aligned) loss mask is set, 0 elsewhere."""
        with self.forward_needs_only(OutputRule(Alignment.TOKEN)):
            return super().compute_logp(data)


class DTARWEngine(DTAEngine, PairRewards):
    """Reward models, trained on pairs."""

    trains_values = True

    def train_rw(self, data: list[Item]) -> None:
        call_with_some_rows(self, super().train_rw, data, _PAIR)

    def evaluate_rw(self, data: list[Item]) -> None:
        call_with_some_rows(self, super().evaluate_rw, data, _PAIR)
