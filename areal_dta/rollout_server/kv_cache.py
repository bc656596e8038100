"""KV cache of a batch whose rows come and go.

All rows share one right edge: row i holds its tokens in the columns
[start[i], edge), so a decode step writes one column for everybody, in place. A new
row is copied in behind the edge, a finished one is overwritten by one from the end of
the batch, and columns that no row uses any more are dropped now and then.

Every layer keeps all positions; layers with a sliding window are limited by the mask
that the model makes, so rows can be moved without knowing about windows.

Shapes: R = rows, U = distinct prefills, H = KV heads, C = columns, P = prefill length,
D = head dim.
"""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

_COLUMN_STEP = 64


class _RowLayer(CacheLayerMixin):
    """Keys and values of one layer, [capacity R, H, capacity C, D]."""

    is_sliding = False
    keys: torch.Tensor  # type: ignore[assignment]  # never None once allocated
    values: torch.Tensor  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.edge = 0

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        raise AssertionError("rows are reserved before the model runs")

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Start with empty buffers, of the kind and head shape of these tensors."""
        self.keys = keys.new_zeros(0, keys.shape[1], 0, keys.shape[3])
        self.values = values.new_zeros(0, values.shape[1], 0, values.shape[3])
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, end = key_states.shape[0], self.edge + key_states.shape[2]
        # Slices shorten silently, and a length of one would even broadcast to none.
        assert rows <= self.keys.shape[0] and end <= self.keys.shape[2]
        self.keys[:rows, :, self.edge : end] = key_states
        self.values[:rows, :, self.edge : end] = value_states
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def get_seq_length(self) -> int:
        return self.edge

    def get_mask_sizes(self, cache_position: torch.Tensor) -> tuple[int, int]:
        return self.edge + cache_position.shape[0], 0

    def get_max_cache_shape(self) -> int:
        return -1


class RowCache(Cache):
    """The KV cache of the running batch, as the model's `past_key_values`."""

    def __init__(self, probe: DynamicCache) -> None:
        """Start empty; `probe`, any filled cache of the model, tells the shapes."""
        self._row_layers = [_RowLayer() for _ in probe.layers]
        super().__init__(layers=list(self._row_layers))
        for layer, source in zip(self._row_layers, probe.layers, strict=True):
            assert source.keys is not None and source.values is not None
            layer.allocate(source.keys, source.values)
        self.starts: list[int] = []

    @property
    def edge(self) -> int:
        """Exclusive end of the columns in use."""
        return self._row_layers[0].edge

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    def advance(self) -> None:
        """Move the edge, after the model has written one column for every row."""
        self._set_edge(self.edge + 1)

    def clear(self) -> None:
        """Forget all rows, and keep the buffers."""
        self.starts = []
        self._set_edge(0)

    def reserve_column(self) -> None:
        """Make room for the column that the next decode step writes."""
        columns = self._row_layers[0].keys.shape[2]
        if self.edge < columns:
            return
        unused = min(self.starts, default=0)
        # Dropping few columns would only bring the next move closer.
        if unused and unused * 4 >= columns:
            self._move(columns, shift=-unused)
        else:
            self._move(max(_COLUMN_STEP, 2 * columns), shift=0)

    def insert(
        self, prefill: DynamicCache, prefill_rows: list[int], lengths: list[int]
    ) -> None:
        """Add rows at the end of the batch.

        Args:
            prefill: keys and values of the distinct prompts, [U, H, P, D], each
                prompt in the columns [0, its length).
            prefill_rows: for each new row, its row in `prefill`.
            lengths: for each new row, how many columns it takes.
        """
        first, longest = self.num_rows, max(lengths)
        if self.num_rows == 0:
            self._set_edge(0)
        self._reserve(first + len(lengths), longest)
        edge = self.edge
        for layer, source in zip(self._row_layers, prefill.layers, strict=True):
            for name in ("keys", "values"):
                rows = getattr(layer, name)[first : first + len(lengths), :, :edge]
                # What a former row left behind is masked, but 0 x NaN would not be 0.
                rows[:, :, : edge - longest] = 0
                rows[:, :, edge - longest :] = _align_right(
                    getattr(source, name), prefill_rows, lengths, longest
                )
        self.starts += [edge - length for length in lengths]

    def remove(self, rows: list[int]) -> list[int]:
        """Drop rows, and return which old row each remaining row now holds."""
        # Rows of the end of the batch fill the holes, so that few rows are copied.
        gone = set(rows)
        num_left = self.num_rows - len(gone)
        order = list(range(num_left))
        holes = [row for row in order if row in gone]
        movers = [row for row in range(num_left, self.num_rows) if row not in gone]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if holes:
            for layer in self._row_layers:
                for tensor in (layer.keys, layer.values):
                    tensor[holes, :, : self.edge] = tensor[movers, :, : self.edge]
        self.starts = [self.starts[row] for row in order]
        return order

    def _reserve(self, rows: int, longest: int) -> None:
        """Make room for `rows` rows, of which the new ones take `longest` columns."""
        # Capacities double, so that the copies are few; a prompt that is longer than
        # the edge shifts everybody to the right.
        capacity, _, columns, _ = held = self._row_layers[0].keys.shape
        shift = max(0, longest - self.edge)
        while capacity < rows:
            capacity = max(1, 2 * capacity)
        needed = self.edge + shift
        if needed > columns:
            columns = max(2 * columns, -(-(needed + 1) // _COLUMN_STEP) * _COLUMN_STEP)
        if shift or (capacity, columns) != (held[0], held[2]):
            self._move(columns, shift, capacity)

    def _move(self, columns: int, shift: int, capacity: int | None = None) -> None:
        """Allocate buffers, with all columns moved right by `shift` (left, if < 0)."""
        edge, rows = self.edge, self.num_rows
        low = max(0, -shift)

        def moved(old: torch.Tensor) -> torch.Tensor:
            new = old.new_zeros(
                capacity or old.shape[0], old.shape[1], columns, old.shape[3]
            )
            new[:rows, :, low + shift : edge + shift] = old[:rows, :, low:edge]
            return new

        # Allocate everything first: running out of memory must not leave some layers
        # moved and others not.
        buffers = [
            (moved(layer.keys), moved(layer.values)) for layer in self._row_layers
        ]
        for layer, (keys, values) in zip(self._row_layers, buffers, strict=True):
            layer.keys, layer.values = keys, values
        self.starts = [start + shift for start in self.starts]
        self._set_edge(edge + shift)

    def _set_edge(self, edge: int) -> None:
        for layer in self._row_layers:
            layer.edge = edge


def _align_right(
    source: torch.Tensor, rows: list[int], lengths: list[int], longest: int
) -> torch.Tensor:
    """Align [U, H, P, D] to the right: [R, H, longest, D], zero-padded."""
    device = source.device
    pad = longest - torch.tensor(lengths, device=device)
    column = torch.arange(longest, device=device) - pad[:, None]
    picked = source[torch.tensor(rows, device=device)[:, None], :, column.clamp(min=0)]
    picked.masked_fill_((column < 0)[:, :, None, None], 0)  # [R, C, H, D]
    return picked.transpose(1, 2)
