"""Tensors of a batch at the controller, which holds only where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from areal.infra.rpc.rtensor import RTensor, clear_fetch_buffer
from areal.infra.utils.concurrent import run_async_task

from areal_dta.engine.row_share import join_pieces


def fetch(items: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Copies of items with some of their keys, each tensor at hand and whole.

    The items stay as they are: a filled RTensor would be sent along, data and all, with
    every later call to a worker. A value in pieces (`engine/shares.py`) is joined if
    ``attention_mask`` is among the keys.
    """
    copies = [
        {key: _copy(value) for key, value in item.items() if key in keys}
        for item in items
    ]
    local = RTensor.localize(copies)
    return [join_pieces(x) if "attention_mask" in x else x for x in local]


def _copy(value: Any) -> Any:
    if isinstance(value, RTensor):
        return replace(value)
    if isinstance(value, dict):
        return {key: _copy(of) for key, of in value.items()}
    if isinstance(value, list):
        return [_copy(of) for of in value]
    return value


def forget(items: Iterable[dict[str, Any]], keys: Sequence[str]) -> None:
    """Drop what ``fetch`` left in AReaL's buffer of fetched shards."""
    found = [item[key] for item in items for key in keys if key in item]
    clear_fetch_buffer([v.shard.shard_id for v in found if isinstance(v, RTensor)])


def delete(item: dict[str, Any]) -> None:
    """Free the shards of an item that will not be trained on, wherever they are."""
    for address, shards in RTensor.collect_shards(item).items():
        run_async_task(RTensor.clear_node, address, shards)
