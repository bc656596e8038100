"""AReaL's trainers of SFT, DPO and reward models with the tree engine and our report.

Everything algorithmic stays AReaL's: these subclasses choose the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from areal.trainer.dpo_trainer import DPOTrainer
from areal.trainer.rw_trainer import RWTrainer
from areal.trainer.sft_trainer import SFTTrainer

from areal_dta.trainers.watched import WatchedTrainer

if TYPE_CHECKING:
    from areal.api.alloc_mode import ModelAllocation


class SupervisedTrainer(WatchedTrainer):
    """Mixin with the actor's engine; list it before AReaL's trainer."""

    kind: ClassVar[str]
    """Kind of the engine; the controller trains by the method ``train_<kind>``."""
    actor_alloc: ModelAllocation

    def __init_subclass__(cls) -> None:
        cls.batch_call = f"train_{cls.kind}"

    def _create_actor(self, actor_config: Any) -> Any:
        areal: Any = super()
        ours = self._create_engine(self.kind, actor_config, self.actor_alloc)
        return ours or areal._create_actor(actor_config)


class DTASFTTrainer(SupervisedTrainer, SFTTrainer):
    """Trains as `SFTTrainer` does; use as a context manager."""

    kind = "lm"


class DTADPOTrainer(SupervisedTrainer, DPOTrainer):
    """Trains as `DPOTrainer` does; use as a context manager."""

    kind = "dpo"

    def _create_ref(self, ref_config: Any, alloc: ModelAllocation) -> Any:
        ours = self._create_engine(self.kind, ref_config, alloc)
        return ours or super()._create_ref(ref_config, alloc)


class DTARWTrainer(SupervisedTrainer, RWTrainer):
    """Trains as `RWTrainer` does; use as a context manager."""

    kind = "rw"


TRAINERS: Final[dict[str, type[WatchedTrainer]]] = {
    "sft": DTASFTTrainer,
    "dpo": DTADPOTrainer,
    "rw": DTARWTrainer,
}
"""Trainer classes by `config.algorithm`."""
