"""AReaL's training engines, corrected: what checkpoints omit, and pairs of rewards.

`registry` has each fault and its remedy. Subclasses: nothing is replaced, so there is
nothing to undo.
"""

from __future__ import annotations

import errno
import os
import shutil
from typing import Any, Final

import torch.nn.functional as F
import transformers
from areal.api import SaveLoadMeta
from areal.engine.fsdp_engine import FSDPEngine, FSDPRWEngine
from areal.trainer.rw.rw_engine import (
    RWController,
    RWEngine,
    _log_empty_rw_stats,
    _rw_loss_weight,
    compute_rw_loss,
)
from areal.utils import seeding, stats_tracker
from torch.distributed.checkpoint.api import CheckpointException

# How PyTorch's writer says that the system refused a write: the reason is lost.
_WRITE_FAILED: Final = ("unexpected pos", "file write failed", "PytorchStreamWriter")
_FULL_BYTES: Final = 2**20


class RecoverableEngine(FSDPEngine):
    """Training engine that can be continued bit for bit.

    AReaL's checkpoint omits the LR schedule and the random generators. The schedule is
    fast-forwarded. The generators are seeded anew for each version, so that what is
    drawn in a step follows from the run's seed, the rank and the step.

    Mixin; list it before AReaL's classes so that its methods win.
    """

    def advance_lr_scheduler(self, num_steps: int) -> None:
        """Fast-forward the LR scheduler by a number of training steps."""
        for _ in range(num_steps):
            self.step_lr_scheduler()

    def set_version(self, version: int) -> None:
        super().set_version(version)
        try:
            seed = seeding.get_seed()
        except ValueError:  # an engine outside of a worker
            return
        transformers.set_seed((seed + version) % 2**32)

    def save(self, meta: SaveLoadMeta) -> None:
        try:
            super().save(meta)
        except CheckpointException as error:
            # Not an Exception: the worker's server would never answer the call.
            raise _first_failure(error, meta.path) from None

    def load(self, meta: SaveLoadMeta) -> None:
        try:
            super().load(meta)
        except CheckpointException as error:
            raise _first_failure(error, meta.path) from None


class PairRWEngine(RWEngine):
    """Counts the pairs of a padded batch by its attention mask.

    AReaL counts them by ``cu_seqlens``, which only packed batches have: a KeyError.
    """

    def _train_rw(self, data: dict[str, Any]) -> None:
        _log_if_no_pairs(data)
        self.engine.train()
        stats = self.engine.train_batch(data, compute_rw_loss, _rw_loss_weight)
        stats_tracker.scalar(**stats)

    def _evaluate_rw(self, data: dict[str, Any]) -> None:
        _log_if_no_pairs(data)
        self.engine.eval()
        self.engine.eval_batch(data, compute_rw_loss, _rw_loss_weight)


class PairRWController(RWController):
    """Keeps pairs on one rank in training too; AReaL does so in evaluation only."""

    def train_rw(self, *args: Any, **kwargs: Any) -> None:
        self._custom_function_call(
            "train_rw", *args, group_size=2, rpc_meta={"broadcast": True}, **kwargs
        )


class PairRewards(FSDPRWEngine):
    """Reward-model engine that counts pairs by the mask and keeps each on a rank."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rw_engine = PairRWEngine(self)

    @classmethod
    def as_controller(cls, config: Any, scheduler: Any) -> Any:
        if config._version != "v1":
            return super().as_controller(config, scheduler)
        return PairRWController(train_engine=cls, config=config, scheduler=scheduler)


def _log_if_no_pairs(data: dict[str, Any]) -> None:
    lengths_B = data["attention_mask"].sum(-1)
    cu_seqlens = F.pad(lengths_B.cumsum(0), (1, 0))
    if _rw_loss_weight({"cu_seqlens": cu_seqlens}) == 0:
        _log_empty_rw_stats(lengths_B.device)


def _first_failure(error: CheckpointException, path: str) -> Exception:
    """Return the failure of the lowest rank: an OSError where the disk is to blame."""
    rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    if isinstance(failure, OSError):
        return failure
    if any(text in str(failure) for text in _WRITE_FAILED):
        is_full = shutil.disk_usage(path).free < _FULL_BYTES
        number = errno.ENOSPC if is_full else errno.EIO
        return OSError(number, f"{os.strerror(number)}: rank {rank}: {failure}")
    return RuntimeError(f"rank {rank}: {type(failure).__name__}: {failure}")
