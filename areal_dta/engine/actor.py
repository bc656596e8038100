"""The PPO actor on the tree engine, as AReaL's FSDPPPOActor is on its FSDP engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal.engine.fsdp_engine import FSDPPPOActor
from areal.utils.data import Normalization, tensor_container_to

from areal_dta.engine.batch import BatchInput
from areal_dta.engine.checks import check_actor_config
from areal_dta.engine.dta_engine import DTAEngine, LossFn, LossWeightFn
from areal_dta.engine.dummy import gather_template, zero_rows
from areal_dta.engine.normalization import CollectiveNormalization
from areal_dta.engine.positions import Alignment
from areal_dta.engine.statistics import LossStatistics

if TYPE_CHECKING:
    from areal.api import Scheduler
    from areal.api.cli_args import PPOActorConfig

Trajectories = list[dict[str, Any]]


class DTAPPOActor(DTAEngine, FSDPPPOActor):
    """``compute_logp``, ``compute_advantages`` and ``ppo_update`` are AReaL's own.

    They stand on ``forward_batch`` and ``train_batch``, which are the tree engine's.
    All three may be called with no trajectories on some of the ranks.
    """

    def __init__(self, config: PPOActorConfig) -> None:
        super().__init__(config)
        self._is_dummy = False
        actor = self.actor
        for name in ("adv_norm", "reward_norm"):
            norm = getattr(actor, name)
            if isinstance(norm, Normalization):
                setattr(actor, name, CollectiveNormalization(getattr(config, name)))

    @classmethod
    def as_controller(cls, config: PPOActorConfig, scheduler: Scheduler) -> Any:
        """AReaL's (v1) controller, whose workers run this engine.

        Raises:
            ValueError: the configuration asks for what the tree engine cannot do.
        """
        check_actor_config(config)
        return super().as_controller(config, scheduler)

    def compute_logp(self, *args: Any, **kwargs: Any) -> Any:
        """Logprobs where the (token-aligned) loss mask is set, 0 elsewhere: AReaL
        masks whatever it does with them."""
        self._forward_alignment = Alignment.TOKEN
        try:
            return super().compute_logp(*args, **kwargs)
        finally:
            self._forward_alignment = None

    def compute_advantages(self, data: Trajectories) -> Trajectories:
        if data:
            return super().compute_advantages(data)
        for norm in (self.actor.reward_norm, self.actor.adv_norm):
            if norm is not None:
                norm.join(self.device)
        return []

    def ppo_update(self, data: Trajectories) -> None:
        template = gather_template(data[0] if data else {}, self.cpu_group)
        if data or template is None:
            super().ppo_update(data)
            return
        # AReaL's update logs and splits its rows, so it gets rows that do not count.
        self._is_dummy = True
        try:
            with LossStatistics().silent_call():
                rows = zero_rows(template, self.config.ppo_n_minibatches)
                super().ppo_update([tensor_container_to(rows, self.device)])
        finally:
            self._is_dummy = False

    def train_batch(
        self, input_: BatchInput, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        rows = [] if self._is_dummy else input_
        return super().train_batch(rows, loss_fn, loss_weight_fn)
