"""The PPO actor on the tree engine, as AReaL's FSDPPPOActor is on its FSDP engine.

It also serves as reference and as teacher, of which only ``compute_logp`` is called.
"""

from __future__ import annotations

from typing import Any

from areal.engine.fsdp_engine import FSDPPPOActor

from areal_dta.config.engine_options import fuses_prox_logp
from areal_dta.engine.algorithm_engine import AlgorithmEngine, Trajectories
from areal_dta.engine.batch import BatchInput
from areal_dta.engine.dta_engine import LossFn, LossWeightFn
from areal_dta.engine.positions import Alignment, ReadRule
from areal_dta.engine.prox_logp import with_own_prox_logp
from areal_dta.engine.row_dispatch import DispatchedActor


class DTAPPOActor(DispatchedActor, AlgorithmEngine, FSDPPPOActor):
    """``compute_logp``, ``compute_advantages`` and ``ppo_update`` are AReaL's own.

    They stand on ``forward_batch`` and ``train_batch``, which are the tree engine's.
    All three may be called with no trajectories on some of the ranks. Trajectories
    without ``prox_logp`` are trained on their own logprobs where that is the same
    (``fuses_prox_logp``).
    """

    def compute_logp(self, *args: Any, **kwargs: Any) -> Any:
        """Logprobs where the (token-aligned) loss mask is set, 0 elsewhere: AReaL
        masks whatever it does with them."""
        with self._forward_reads_only(ReadRule(Alignment.TOKEN)):
            return super().compute_logp(*args, **kwargs)

    def compute_advantages(self, data: Trajectories) -> Trajectories:
        if data:
            return super().compute_advantages(data)
        for norm in (self.actor.reward_norm, self.actor.adv_norm):
            if norm is not None:
                norm.join(self.device)
        return []

    def ppo_update(self, data: Trajectories) -> None:
        self._with_some_rows(super().ppo_update, data, self.config.ppo_n_minibatches)

    def train_batch(
        self, input_: BatchInput, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        rows = input_ if isinstance(input_, dict) else next(iter(input_), {})
        if fuses_prox_logp(self.config) and "prox_logp" not in rows:
            loss_fn = with_own_prox_logp(loss_fn)
        return super().train_batch(input_, loss_fn, loss_weight_fn)
