"""A rank's share of a batch: which rows of the items that it was sent are its own.

An *item* is the group of one prompt, a dict of tensors [B, S]; in transit each tensor
is one shard, fetched as a whole. A *piece* is what a rank computed for some rows of an
item. A value of an item whose rows went to several ranks stays in pieces, each on its
worker, until it is needed as a whole.
"""

# B = rows of an item, S = its padded width

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_dta.engine.batch import select_rows

Item = dict[str, Any]

PIECES: Final = "areal_dta_pieces"
"""Marks a value in pieces: {PIECES: [tensor [b, s], ...], ROWS: text}."""
ROWS: Final = "areal_dta_rows"
UNCHANGED: Final = ("input_ids", "attention_mask", "versions")
"""Keys of an item that ``compute_advantages`` leaves as they are."""


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of one rank.

    Sent as JSON: AReaL's RPC would otherwise broadcast the list element by element.
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """[minibatch][item of those sent][n]: rows of the item."""
    width: int
    """Longest sequence of the whole batch, over all ranks: AReaL's statistics, and its
    rule for sequences that hit the length limit, depend on the padded width."""

    def to_text(self) -> str:
        return json.dumps([self.rows, self.width])

    @classmethod
    def from_text(cls, text: str) -> Share:
        rows, width = json.loads(text)
        return cls(tuple(tuple(map(tuple, of)) for of in rows), width)

    def take(self, items: Sequence[Item], minibatch: int) -> list[Item]:
        """Return the rows of a minibatch, grouped by item; items without any are left
        out."""
        of_items = self.rows[minibatch]
        if len(of_items) != len(items):
            raise ValueError(f"a share of {len(of_items)} items came with {len(items)}")
        return [
            take_rows(item, rows)
            for item, rows in zip(items, of_items, strict=True)
            if rows
        ]

    def take_all(self, items: Sequence[Item]) -> list[Item]:
        """Return the rows of all minibatches, one entry per item, as `all_rows`."""
        return [
            take_rows(item, rows)
            for item, rows in zip(items, self.all_rows(), strict=True)
        ]

    def all_rows(self) -> list[list[int]]:
        num_items = len(self.rows[0])
        return [[r for of in self.rows for r in of[i]] for i in range(num_items)]


def take_rows(item: Item, rows: Sequence[int]) -> Item:
    """Return some rows of an item, cut to the longest of them."""
    mask_BS = item["attention_mask"]
    num_rows, width = mask_BS.shape
    if list(rows) == list(range(num_rows)):
        return item
    index = torch.tensor(list(rows), device=mask_BS.device)
    longest = int(mask_BS[index].sum(-1).max())
    taken = select_rows(item, index, num_rows)
    for key, value in taken.items():
        if torch.is_tensor(value) and value.ndim and value is not item[key]:
            if value.ndim > 1 and value.shape[1] == width:
                value = value[:, :longest]
            taken[key] = value.contiguous()
    return taken


def widen(item: Item, width: int) -> Item:
    """Pad an item's tensors [B, S, ...] with zeros to [B, width, ...]."""
    num_rows, old = item["attention_mask"].shape
    if old >= width:
        return item
    wide: Item = {}
    for key, value in item.items():
        if torch.is_tensor(value) and value.ndim > 1 and value.shape[1] == old:
            after = [0, 0] * (value.ndim - 2) + [0, width - old]
            value = F.pad(value, after)
        wide[key] = value
    return wide


def narrow(item: Item, num_rows: int, wide: int, width: int) -> Item:
    """Undo `widen`; tensors [num_rows, wide, ...] are those that it padded."""
    return {
        key: value[:, :width].contiguous()
        if torch.is_tensor(value)
        and value.ndim > 1
        and value.shape[:2] == (num_rows, wide)
        else value
        for key, value in item.items()
    }


def in_pieces(pieces: Sequence[Any], rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return a value of an item as pieces, each with the rows that it belongs to."""
    return {PIECES: list(pieces), ROWS: json.dumps([list(r) for r in rows])}


def is_in_pieces(value: Any) -> bool:
    return isinstance(value, dict) and PIECES in value


def join_pieces(item: Item) -> Item:
    """Return the item with every value whole."""
    num_rows, width = item["attention_mask"].shape
    return {
        key: _join(value, num_rows, width) if is_in_pieces(value) else value
        for key, value in item.items()
    }


def _join(value: dict[str, Any], num_rows: int, width: int) -> Tensor:
    pieces: list[Tensor] = value[PIECES]
    whole = pieces[0].new_zeros((num_rows, width, *pieces[0].shape[2:]))
    for piece, rows in zip(pieces, json.loads(value[ROWS]), strict=True):
        whole[torch.tensor(rows), : piece.shape[1]] = piece
    return whole
