"""AReaL's trainers of SFT, DPO and reward models with the tree engine and our report.

Everything algorithmic stays AReaL's: these subclasses choose the engine, and continue
with the data where a run was stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from areal.api.cli_args import TrainDatasetConfig
from areal.infra.data_service.rdataset import RDataset
from areal.trainer.dpo_trainer import DPOTrainer
from areal.trainer.rw_trainer import RWTrainer
from areal.trainer.sft_trainer import SFTTrainer
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from areal_dta.config.composed import ConfigError
from areal_dta.trainers.watched import WatchedTrainer

if TYPE_CHECKING:
    from areal.api.alloc_mode import ModelAllocation


class BatchLoader:
    """Data loader that continues where a run was stopped; made from AReaL's.

    AReaL restarts the shuffle at epoch 0, so that a run that continues in a later epoch
    sees another order. Here a batch follows from the number of those before it.

    Iterating yields the rest of an epoch.

    Args:
        num_batches_done: number of batches that the run was trained on.
    """

    def __init__(self, loader: StatefulDataLoader, num_batches_done: int = 0) -> None:
        self._loader, self._num_done = loader, num_batches_done
        self.batch_size = loader.batch_size

    def __len__(self) -> int:
        """Return the number of training steps per epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        epoch, num_skipped = divmod(self._num_done, len(loader))
        loader.sampler.set_epoch(epoch)
        indices = list(loader.sampler)[num_skipped * loader.batch_size :]
        rest: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=indices,
            drop_last=loader.drop_last,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
        )
        for batch in rest:
            self._num_done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches_per_epoch": len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the data are those of the checkpoint.

        Raises:
            ConfigError: they have another number of batches.
        """
        before = state.get("num_batches_per_epoch", len(self))  # 0.1.0 saved none
        if before != len(self):
            raise ConfigError(
                f"the recover checkpoint is of {before} batches per epoch, the data "
                f"set has {len(self)}; continue with the same train_dataset, or set "
                "recover.mode=off"
            )


class SupervisedTrainer(WatchedTrainer):
    """Mixin with the actor's engine and the data; list it before AReaL's trainer."""

    kind: ClassVar[str]
    """Kind of the engine; the controller trains by the method ``train_<kind>``."""
    actor_alloc: ModelAllocation

    def __init_subclass__(cls) -> None:
        cls.batch_call = f"train_{cls.kind}"

    def _create_actor(self, actor_config: Any) -> Any:
        areal: Any = super()
        ours = self._create_engine(self.kind, actor_config, self.actor_alloc)
        return ours or areal._create_actor(actor_config)

    def _create_dataloader(
        self, dataset: Any, dataset_config: Any, rank: int, world_size: int
    ) -> Any:
        areal: Any = super()
        loader = areal._create_dataloader(
            dataset, dataset_config=dataset_config, rank=rank, world_size=world_size
        )
        # The data service of an RDataset reads ahead by itself.
        if isinstance(dataset_config, TrainDatasetConfig) and not isinstance(
            dataset, RDataset
        ):
            return BatchLoader(loader, self.num_steps_done)
        return loader


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
