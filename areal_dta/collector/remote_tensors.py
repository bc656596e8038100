"""Tensors that a controller refers to: fetching, and what it costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import ray
from areal.infra.rpc import rtensor
from areal.infra.rpc.rtensor import RTensor, TensorShardInfo, clear_fetch_buffer
from areal.infra.utils.http import get_default_connector
from torch import Tensor
from torch.utils._pytree import tree_map_only

from areal_dta.engine.row_share import Item, join_pieces


def fetch(items: Sequence[Item], keys: Sequence[str]) -> list[Item]:
    """Return copies of items with some of their keys, tensors at hand and whole.

    The items stay as they are: fetching fills an RTensor in place, and a filled one
    would be sent along, data and all, with every later call to a worker. A value in
    pieces (see `engine.row_share`) is joined if ``attention_mask`` is among the keys.
    """
    chosen = [{key: x[key] for key in keys if key in x} for x in items]
    local = RTensor.localize(tree_map_only(RTensor, replace, chosen))
    return [join_pieces(x) if "attention_mask" in x else x for x in local]


def forget(items: Iterable[Item], keys: Sequence[str]) -> None:
    """Drop what ``fetch`` left in AReaL's buffer of fetched shards."""
    found = [item[key] for item in items for key in keys if key in item]
    clear_fetch_buffer([v.shard.shard_id for v in found if isinstance(v, RTensor)])


class FetchMeter:
    """AReaL's backend of remote tensors with a time-out, and counts of its traffic.

    Args:
        timeout_seconds: of one attempt to fetch or to free; AReaL makes three attempts,
            of an hour each by default.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._backend: rtensor.RTensorBackend
        if ray.is_initialized():
            self._backend = _RayBackend(timeout_seconds)
        else:
            self._backend = _HttpBackend(timeout_seconds)
        self._lock = threading.Lock()
        self._bytes, self._seconds, self._tensors = 0, 0.0, 0

    def install(self) -> Callable[[], None]:
        """Use it for all of this process; return the undo."""
        before = rtensor._backend
        rtensor.set_backend(self)

        def undo() -> None:
            rtensor.set_backend(before)

        return undo

    def fetch(self, shards: list[TensorShardInfo]) -> list[Tensor]:
        started = time.perf_counter()
        tensors = self._backend.fetch(shards)
        seconds = time.perf_counter() - started
        with self._lock:
            self._bytes += sum(tensor.nbytes for tensor in tensors)
            self._seconds += seconds
            self._tensors += len(tensors)
        return tensors

    def store(self, tensor: Tensor) -> Any:
        return self._backend.store(tensor)

    async def delete(self, node_addr: str, shard_ids: list[Any]) -> None:
        await self._backend.delete(node_addr, shard_ids)

    def take_metrics(self) -> dict[str, float]:
        """Return what was fetched since the last call, in bytes before encoding."""
        with self._lock:
            found = {
                "collector/fetched_bytes": float(self._bytes),
                "collector/fetched_tensors": float(self._tensors),
                "collector/fetched_seconds": self._seconds,
            }
            self._bytes, self._seconds, self._tensors = 0, 0.0, 0
        return found


class _HttpBackend(rtensor.HttpRTensorBackend):
    def __init__(self, timeout_seconds: float) -> None:
        super().__init__()
        self._timeout_seconds = timeout_seconds

    def _create_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
            read_bufsize=10 * 1024 * 1024,  # as AReaL does
            connector=get_default_connector(),
        )


class _RayBackend(rtensor.RayRTensorBackend):
    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds

    def fetch(self, shards: list[TensorShardInfo]) -> list[Tensor]:
        if not shards:
            return []
        tensors: list[Tensor] = ray.get(
            [shard.shard_id for shard in shards], timeout=self._timeout_seconds
        )
        return tensors
