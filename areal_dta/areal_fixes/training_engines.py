"""AReaL's training engines, corrected: checkpoints, pairs of rewards, payloads.

`registry` has each fault and its remedy.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from areal.api import ParallelStrategy, SaveLoadMeta
from areal.engine.fsdp_engine import FSDPEngine, FSDPRWEngine
from areal.infra.rpc import rtensor
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
_RPC_SERVERS: Final = (
    "areal.infra.rpc.guard.engine_blueprint",
    "areal.infra.rpc.ray_rpc_server",
)


class RecoverableEngine(FSDPEngine):
    """Training engine that can be continued bit for bit.

    AReaL's checkpoint omits the LR schedule and the random generators. The schedule is
    fast-forwarded. The generators are seeded anew for each version, so that what is
    drawn in a step follows from the run's seed, the rank and the step.

    Mixin; list it before AReaL's classes so that its methods win.
    """

    def create_process_group(
        self, parallel_strategy: ParallelStrategy | None = None
    ) -> None:
        super().create_process_group(parallel_strategy)
        keep_lone_payloads()
        read_own_results()

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


def keep_lone_payloads() -> Callable[[], None]:
    """Let a rank that shares its payloads with no other keep them as they are.

    The worker's RPC server moves a payload to the device, and then broadcasts it over
    the ranks of context, tensor and pipeline parallelism, value by value: two
    collectives for each entry of each dict. The move stays.

    Returns:
        A function that undoes it in this process.
    """
    replaced: list[tuple[Any, Any]] = []
    for name in _RPC_SERVERS:  # the one that runs this process is loaded
        module: Any = sys.modules.get(name)
        if module is None or hasattr(module.broadcast_tensor_container, "__wrapped__"):
            continue
        replaced.append((module, module.broadcast_tensor_container))
        module.broadcast_tensor_container = _to_others_alone(
            module.broadcast_tensor_container
        )

    def undo() -> None:
        for module, original in replaced:
            module.broadcast_tensor_container = original

    return undo


def read_own_results() -> Callable[[], None]:
    """Let a worker read results that it holds itself from its memory.

    As over HTTP, it gets copies on the CPU.

    Returns:
        A function that undoes it in this process.
    """
    backend = rtensor.HttpRTensorBackend
    original: Any = backend._fetch_shard_group
    if hasattr(original, "__wrapped__"):
        return lambda: None

    @functools.wraps(original)
    async def fetch_group(
        self: Any, session: Any, node_addr: str, grouped: Any, *args: Any, **kwargs: Any
    ) -> Any:
        own = [rtensor._storage.get(shard.shard_id) for _, shard in grouped]
        held = [
            x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for x in own
            if x is not None
        ]
        if len(held) == len(own):
            return held
        return await original(self, session, node_addr, grouped, *args, **kwargs)

    def undo() -> None:
        backend._fetch_shard_group = original

    backend._fetch_shard_group = fetch_group
    return undo


def _to_others_alone(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(broadcast)
    def broadcast_to_others(data: Any, src_rank: int = 0, group: Any = None) -> Any:
        if dist.get_world_size(group) == 1:
            return data
        return broadcast(data, src_rank=src_rank, group=group)

    return broadcast_to_others


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
