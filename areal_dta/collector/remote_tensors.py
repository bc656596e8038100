"""Tensors that a controller refers to. (Separate module: the report uses it too.)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from areal.infra.rpc.rtensor import RTensor, clear_fetch_buffer
from areal.infra.utils.concurrent import run_async_task
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


def delete(item: Item) -> None:
    """Free the shards of an item that will not be trained on, on their workers."""
    for address, shards in RTensor.collect_shards(item).items():
        run_async_task(RTensor.clear_node, address, shards)
