"""Tensors of a batch at the controller, which holds only where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from areal.infra.rpc.rtensor import RTensor, clear_fetch_buffer
from areal.infra.utils.concurrent import run_async_task


def fetch(items: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Copies of items with some of their keys, each tensor at hand.

    The items stay as they are: a filled RTensor would be sent along, data and all, with
    every later call to a worker.
    """
    copies = [
        {
            key: replace(value) if isinstance(value, RTensor) else value
            for key, value in item.items()
            if key in keys
        }
        for item in items
    ]
    return list(RTensor.localize(copies))


def forget(items: Iterable[dict[str, Any]], keys: Sequence[str]) -> None:
    """Drop what ``fetch`` left in AReaL's buffer of fetched shards."""
    found = [item[key] for item in items for key in keys if key in item]
    clear_fetch_buffer([v.shard.shard_id for v in found if isinstance(v, RTensor)])


def delete(item: dict[str, Any]) -> None:
    """Free the shards of an item that will not be trained on, wherever they are."""
    for address, shards in RTensor.collect_shards(item).items():
        run_async_task(RTensor.clear_node, address, shards)
