"""Keys and values of the batch's rows: what each row does not share with others.

A row reads its prompt from the prefix cache and appends its answer here, in the columns
[0, length) of its row. Short prompts are copied into the row's first columns instead:
one call of attention for all rows is then cheaper than another one per prompt. Rows
that leave are replaced by rows from the end, so that rows in use are [0, num_rows).

Columns behind a row's length are masked. They must be finite, since 0 x NaN is not 0.
"""

# L = layers, R = rows, K = key/value heads, C = columns, D = head dim

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_dta.rollout_server.answers import Answer
from areal_dta.rollout_server.prefix_cache import KV, KVShape, Node

_COLUMN_STEP = 64


@dataclass(eq=False, slots=True)
class Row:
    """An admitted request."""

    answer: Answer
    #: Where its prefix ends in the cache, which keeps it until the row leaves.
    node: Node
    #: Tokens of the prefix that become the first columns of its tail: all or none.
    num_copied: int

    @property
    def max_columns(self) -> int:
        return self.num_copied + self.answer.task.max_new_tokens


class RowTails:
    """Keys and values [L, R, K, C, D] of all rows."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self.lengths: list[int] = []
        self.clear()

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Positions allocated: rows x columns."""
        return self.keys.shape[1] * self.keys.shape[3]

    def clear(self) -> None:
        """Forget all rows, and free the memory."""
        self.lengths = []
        self._allocate(0, 0)

    def reserve(
        self, rows: int, columns: int, max_columns: int, max_positions: int
    ) -> None:
        """Make room for so many rows and columns, and hold no more than allowed.

        Args:
            max_columns: columns that these rows may need later.
            max_positions: limit of `capacity`, if that is enough for what is needed.
        """
        held_rows, held_columns = self.keys.shape[1], self.keys.shape[3]
        fits = rows <= held_rows and columns <= held_columns
        if fits and self.capacity <= max(max_positions, rows * columns):
            return
        # Double what is too small, and fall back to less where that is too much.
        old, num_rows = (self.keys, self.values), self.num_rows
        more_columns = min(max(_COLUMN_STEP, 2 * columns), max(columns, max_columns))
        sizes = [(2 * rows, more_columns), (rows, more_columns), (rows, columns)]
        if rows <= held_rows:
            sizes.insert(0, (held_rows, more_columns))
        if columns <= held_columns:
            sizes.insert(0, (2 * rows, held_columns))
        size = next((x for x in sizes if x[0] * x[1] <= max_positions), sizes[-1])
        used = max(self.lengths, default=0)
        self._allocate(*size)
        for new, source in zip((self.keys, self.values), old, strict=True):
            new[:, :num_rows, :, :used] = source[:, :num_rows, :, :used]

    def remove(self, rows: list[int], unclean: list[int]) -> list[int]:
        """Drop rows, and return which old row each remaining row now holds.

        Args:
            unclean: those of the rows whose keys or values may not be finite.
        """
        for tensor in (self.keys, self.values):
            tensor[:, unclean] = 0
        # Rows of the end of the batch fill the holes, so that few rows are copied.
        gone = set(rows)
        num_left = self.num_rows - len(gone)
        order = list(range(num_left))
        holes = [row for row in order if row in gone]
        movers = [row for row in range(num_left, self.num_rows) if row not in gone]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
            length = self.lengths[mover]
            for tensor in (self.keys, self.values):
                tensor[:, hole, :, :length] = tensor[:, mover, :, :length]
        self.lengths = [self.lengths[row] for row in order]
        return order

    def copy_row(self, row: int, start: int, end: int) -> KV:
        """Copy the columns [start, end) of a row, [L, K, S, D]."""
        return KV(
            *(
                x[:, row, :, start:end].clone(memory_format=torch.contiguous_format)
                for x in (self.keys, self.values)
            )
        )

    def _allocate(self, rows: int, columns: int) -> None:
        shape = self._shape

        def zeros(width: int) -> Tensor:
            sizes = (shape.num_layers, rows, shape.num_heads, columns, width)
            return torch.zeros(sizes, dtype=shape.dtype, device=shape.device)

        self.keys, self.values = zeros(shape.key_dim), zeros(shape.value_dim)
