"""AReaL's trainers of SFT, DPO and reward models with the tree engine and our report.

Everything algorithmic stays AReaL's: these subclasses choose the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from areal.trainer.dpo_trainer import DPOTrainer
from areal.trainer.rw_trainer import RWTrainer
from areal.trainer.sft_trainer import SFTTrainer

from areal_dta.trainers.watched import WatchedTrainer

if TYPE_CHECKING:
    from areal.api.alloc_mode import ModelAllocation


class DTASFTTrainer(WatchedTrainer, SFTTrainer):
    """Trains as `SFTTrainer` does; use as a context manager."""

    batch_call = "train_lm"

    def _create_actor(self, actor_config: Any) -> Any:
        ours = self._create_engine("lm", actor_config, self.actor_alloc)
        return ours or super()._create_actor(actor_config)


class DTADPOTrainer(WatchedTrainer, DPOTrainer):
    """Trains as `DPOTrainer` does; use as a context manager."""

    batch_call = "train_dpo"

    def _create_actor(self, actor_config: Any) -> Any:
        ours = self._create_engine("dpo", actor_config, self.actor_alloc)
        return ours or super()._create_actor(actor_config)

    def _create_ref(self, ref_config: Any, alloc: ModelAllocation) -> Any:
        ours = self._create_engine("dpo", ref_config, alloc)
        return ours or super()._create_ref(ref_config, alloc)


class DTARWTrainer(WatchedTrainer, RWTrainer):
    """Trains as `RWTrainer` does; use as a context manager."""

    batch_call = "train_rw"

    def _create_actor(self, actor_config: Any) -> Any:
        ours = self._create_engine("rw", actor_config, self.actor_alloc)
        return ours or super()._create_actor(actor_config)


TRAINERS: Final[dict[str, type[WatchedTrainer]]] = {
    "sft": DTASFTTrainer,
    "dpo": DTADPOTrainer,
    "rw": DTARWTrainer,
}
"""Trainer classes by `config.algorithm`."""
