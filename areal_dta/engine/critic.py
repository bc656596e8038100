"""The PPO critic on the tree engine, as AReaL's FSDPPPOCritic is on its FSDP engine."""

from __future__ import annotations

import functools
from typing import Any

from areal.engine.fsdp_engine import FSDPPPOCritic
from torch import Tensor

from areal_dta.engine.algorithm_engine import AlgorithmEngine, Trajectories
from areal_dta.engine.batch import BatchInput
from areal_dta.engine.dta_engine import LossFn, LossWeightFn
from areal_dta.engine.positions import Alignment, ReadRule
from areal_dta.engine.row_dispatch import DispatchedCritic


class DTAPPOCritic(DispatchedCritic, AlgorithmEngine, FSDPPPOCritic):
    """``compute_values`` and ``ppo_update`` are AReaL's own; see ``DTAPPOActor``."""

    needs_values = True

    def compute_values(self, *args: Any, **kwargs: Any) -> Any:
        """Values before each token whose (token-aligned) loss mask is set, and at
        each sequence's last token, from which GAE bootstraps; 0 elsewhere."""
        with self._forward_reads_only(ReadRule(Alignment.TOKEN, last=True)):
            return super().compute_values(*args, **kwargs)

    def ppo_update(self, data: Trajectories) -> None:
        self._with_some_rows(super().ppo_update, data, self.config.ppo_n_minibatches)

    def train_batch(
        self, input_: BatchInput, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        # AReaL's loss squeezes its values, and one token must stay one.
        @functools.wraps(loss_fn)
        def of_columns(values: Tensor, mb_input: dict[str, Any]) -> Tensor:
            return loss_fn(values[:, None], mb_input)

        return super().train_batch(input_, of_columns, loss_weight_fn)
