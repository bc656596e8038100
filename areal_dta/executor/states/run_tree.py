"""Where the states of a block go: its runs, and the chunks of its scans.

A state is handed from a token to the next one, so a block is cut into *runs*: segments
without a branch between them, ended also where a child fragment needs the state. A
scan works on *chunks* of runs. Chunks form a tree as runs do: those of one depth are
computed together, each from the state that the chunk above it left.

A chunk that its run does not fill is padded with tokens that leave a state as it was.

Layouts are made on the host and are plain index arrays: test_run_tree.py.
"""

# S = block tokens, R = runs, M = chunks, C = tokens of a chunk, W = convolution width

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK_SIZES = (16, 32, 64)
_STEP_TOKENS = 96
"""Cost of one more chunk depth, in tokens of a scan: an estimate."""
_FULL_CHUNK = 64
"""Chunk size at which half of a token's cost is that of the chunk's square."""


class RunTree:
    """Runs of a block, and what their convolutions and scans read.

    Args:
        lengths: tokens of each segment, in depth-first order, each at least 1.
        parents: for each the index of the segment above it, -1 if that lies outside.
        exits: segments at whose ends states leave the block.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        parents: Sequence[int],
        exits: Collection[int] = (),
    ) -> None:
        num_children = [0] * len(lengths)
        for parent in parents:
            if parent >= 0:
                num_children[parent] += 1
        self.num_tokens = sum(lengths)
        self.lengths: list[int] = []
        self.parents: list[int] = []
        run_of: list[int] = []
        for i, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
            is_only_child = parent >= 0 and num_children[parent] == 1
            if is_only_child and parent == i - 1 and parent not in exits:
                run_of.append(run_of[parent])
                self.lengths[-1] += length
            else:
                run_of.append(len(self.lengths))
                self.lengths.append(length)
                self.parents.append(run_of[parent] if parent >= 0 else -1)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])[:-1]
        self.exits = [run_of[segment] for segment in exits]
        """Run at whose end each exit lies."""

    @property
    def is_chain(self) -> bool:
        return len(self.lengths) == 1

    @cached_property
    def chunk_size(self) -> int:
        """The size of CHUNK_SIZES whose scan is predicted to be the fastest."""
        return min(CHUNK_SIZES, key=self.chunk_cost)

    def chunk_cost(self, size: int) -> float:
        """Return the predicted cost of a scan in chunks of ``size``, in tokens."""
        num_chunks = [-(-length // size) for length in self.lengths]
        tokens = sum(num_chunks) * size * (1 + size / _FULL_CHUNK)
        return tokens + _STEP_TOKENS * max(self._depths(num_chunks), default=0)

    def _depths(self, num_chunks: Sequence[int]) -> list[int]:
        """Return, per run, the chunks from the top down to its end."""
        depths: list[int] = []
        for num, parent in zip(num_chunks, self.parents, strict=True):
            depths.append(num + (depths[parent] if parent >= 0 else 0))
        return depths

    def arrays(
        self, widths: Collection[int], with_levels: bool = False
    ) -> dict[tuple[Any, ...], np.ndarray]:
        """Return the index arrays of convolutions of some widths, and of scans.

        Args:
            with_levels: also those of scans over whole runs.
        """
        arrays: dict[tuple[Any, ...], np.ndarray] = {}
        for width in widths:
            arrays.update(self._convolution(width))
        arrays.update(self._chunks(self.chunk_size))
        if with_levels:
            arrays.update(self._run_levels())
        return arrays

    def _convolution(self, width: int) -> dict[tuple[Any, ...], np.ndarray]:
        """Where each run's inputs lie, with those right before it.

        Indices are those of the entering tail, W - 1 tokens, with the block behind it.
        """
        tail = width - 1
        before: list[np.ndarray] = []  # the inputs right before each run
        ends: list[np.ndarray] = []  # the last ones of each run
        for start, length, parent in zip(
            self.starts, self.lengths, self.parents, strict=True
        ):
            before.append(ends[parent] if parent >= 0 else np.arange(tail))
            own = np.arange(max(0, length - tail), length) + start + tail
            ends.append(np.concatenate([before[-1], own])[len(own) :])
        arrays = {}
        if self.exits:
            left = np.concatenate([ends[run] for run in self.exits])
            arrays["tail", width, "left"] = left
        if not self.is_chain:
            own = [
                np.arange(length) + start + tail
                for start, length in zip(self.starts, self.lengths, strict=True)
            ]
            pieces = [x for pair in zip(before, own, strict=True) for x in pair]
            arrays["tail", width, "read"] = np.concatenate(pieces)
            run_S = np.repeat(np.arange(len(self.lengths)), self.lengths)
            arrays["tail", width, "kept"] = (
                np.arange(self.num_tokens) + (run_S + 1) * tail
            )
        return arrays

    def _chunks(self, size: int) -> dict[tuple[Any, ...], np.ndarray]:
        """Where tokens lie in chunks, sorted by depth, and which chunk is above which.

        A chain needs none of it: its chunks follow one another.
        """
        num_chunks = [-(-length // size) for length in self.lengths]
        ends = self._depths(num_chunks)
        first = np.concatenate([[0], np.cumsum(num_chunks)])
        depth_M = np.empty(first[-1], np.int64)
        above_M = np.arange(first[-1]) - 1
        for run, parent in enumerate(self.parents):
            start, end = first[run], first[run + 1]
            depth_M[start:end] = np.arange(ends[run] - num_chunks[run], ends[run])
            above_M[start] = first[parent + 1] - 1 if parent >= 0 else -1
        order = np.argsort(depth_M, kind="stable")
        rank_M = np.empty_like(order)
        rank_M[order] = np.arange(len(order))
        counts = np.bincount(depth_M)
        arrays: dict[tuple[Any, ...], np.ndarray] = {}
        if self.exits:
            last = [rank_M[first[run + 1] - 1] for run in self.exits]
            arrays["chunk", "left"] = np.array(last, np.int64)
        if self.is_chain:
            return arrays
        slots = [
            rank_M[first[run] + np.arange(length) // size] * size
            + np.arange(length) % size
            for run, length in enumerate(self.lengths)
        ]
        arrays["chunk", "slot"] = np.concatenate(slots)
        offset = np.concatenate([[0], np.cumsum(counts)])
        for depth in range(1, len(counts)):
            above = rank_M[above_M[order[offset[depth] : offset[depth + 1]]]]
            arrays["chunk", "above", depth] = above - offset[depth - 1]
        return arrays

    @cached_property
    def _levels(self) -> list[list[int]]:
        """Runs by their depth."""
        depth = [depth - 1 for depth in self._depths([1] * len(self.lengths))]
        levels: list[list[int]] = [[] for _ in range(max(depth) + 1)]
        for run, at in enumerate(depth):
            levels[at].append(run)
        return levels

    def _ends(self, level: Sequence[int]) -> np.ndarray:
        """Return 0 and where each run of a level ends, runs side by side."""
        return np.cumsum([0, *(self.lengths[run] for run in level)])

    def _run_levels(self) -> dict[tuple[Any, ...], np.ndarray]:
        """Where tokens lie by depth of their run, and which run is above which."""
        arrays: dict[tuple[Any, ...], np.ndarray] = {}
        rank = {run: i for level in self._levels for i, run in enumerate(level)}
        in_order = [run for level in self._levels for run in level]
        if self.exits:
            left = [in_order.index(run) for run in self.exits]
            arrays["run", "left"] = np.array(left, np.int64)
        for depth, level in enumerate(self._levels):
            if len(level) > 1:
                arrays["run", "ends", depth] = self._ends(level)
            if depth:
                above = [rank[self.parents[run]] for run in level]
                arrays["run", "above", depth] = np.array(above, np.int64)
        if in_order != sorted(in_order):
            slot_S = np.empty(self.num_tokens, np.int64)
            end = 0
            for run in in_order:
                start, length = self.starts[run], self.lengths[run]
                slot_S[start : start + length] = np.arange(end, end + length)
                end += length
            arrays["run", "slot"] = slot_S
        return arrays

    def levels_on_device(self, arrays: Mapping[Any, Tensor]) -> RunLevels:
        """Return the runs of this block by depth.

        Args:
            arrays: those of `arrays` with levels, on the device.
        """
        levels = []
        for depth, level in enumerate(self._levels):
            ends = self._ends(level)
            levels.append(
                RunLevel(
                    num_runs=len(level),
                    num_tokens=int(ends[-1]),
                    ends=arrays.get(("run", "ends", depth)),
                    ends_on_host=torch.from_numpy(ends),
                    above=arrays.get(("run", "above", depth)),
                )
            )
        slot, left = (arrays.get(("run", name)) for name in ("slot", "left"))
        return RunLevels(levels, slot, left)

    def on_device(self, arrays: Mapping[Any, Tensor]) -> ChunkTree:
        """Return the chunks of this block.

        Args:
            arrays: those of `arrays`, on the device.
        """
        size = self.chunk_size
        depths = max(self._depths([-(-n // size) for n in self.lengths]))
        return ChunkTree(
            size=size,
            num_tokens=self.num_tokens,
            num_chunks=sum(-(-length // size) for length in self.lengths),
            slot_S=arrays.get(("chunk", "slot")),
            above=[arrays.get(("chunk", "above", d)) for d in range(depths)],
            left=arrays.get(("chunk", "left")),
        )


class _Fill(torch.autograd.Function):
    """[S, ...] -> [M * C, ...] by slots; zeros elsewhere. Both ways copy rows only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_S: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(slot_S)
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, slot_S, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (slot_S,) = ctx.saved_tensors
        return grads[0].index_select(0, slot_S), None, None


class _Empty(torch.autograd.Function):
    """[M * C, ...] -> [S, ...]: what `_Fill` undoes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_S: Tensor) -> Tensor:
        ctx.save_for_backward(slot_S)
        ctx.shape = x.shape
        return x.index_select(0, slot_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (slot_S,) = ctx.saved_tensors
        grad = grads[0].new_zeros(ctx.shape).index_copy_(0, slot_S, grads[0])
        return grad, None


@dataclass(frozen=True, slots=True)
class ChunkTree:
    """Chunks of a block on its device, sorted by depth."""

    size: int
    num_tokens: int
    num_chunks: int
    slot_S: Tensor | None
    """Where each token lies in the chunks, end to end; None: in order."""
    above: list[Tensor | None]
    """Per depth, for each chunk its parent among those of the depth above. None at the
    top, and everywhere in a chain."""
    left: Tensor | None
    """Chunks after which states leave the block."""

    def split(self, x_SX: Tensor) -> Tensor:
        """Return tokens [S, ...] as chunks [M, C, ...], padded with zeros."""
        size = self.num_chunks * self.size
        if self.slot_S is not None:
            filled: Tensor = _Fill.apply(x_SX, self.slot_S, size)
        else:
            padding = [0, 0] * (x_SX.dim() - 1) + [0, size - self.num_tokens]
            filled = torch.nn.functional.pad(x_SX, padding)
        return filled.unflatten(0, (self.num_chunks, self.size))

    def join(self, x_MCX: Tensor) -> Tensor:
        """Return chunks [M, C, ...] as tokens [S, ...]."""
        flat = x_MCX.flatten(0, 1)
        if self.slot_S is None:
            return flat[: self.num_tokens]
        joined: Tensor = _Empty.apply(flat, self.slot_S)
        return joined


@dataclass(frozen=True, slots=True)
class RunLevel:
    """Runs of one depth, side by side."""

    num_runs: int
    num_tokens: int
    ends: Tensor | None
    """0 and where each run ends, [R + 1]; None for a single run."""
    ends_on_host: Tensor
    above: Tensor | None
    """For each run its parent among those of the depth above; None at the top."""


@dataclass(frozen=True, slots=True)
class RunLevels:
    """Runs of a block on its device, sorted by depth."""

    levels: list[RunLevel]
    slot_S: Tensor | None
    """Where each token lies in the levels, end to end; None: in order."""
    left: Tensor | None
    """Runs after which states leave the block."""

    def sort(self, x_SX: Tensor) -> Tensor:
        """Return tokens [S, ...] by the depth of their run."""
        if self.slot_S is None:
            return x_SX
        filled: Tensor = _Fill.apply(x_SX, self.slot_S, len(x_SX))
        return filled

    def restore(self, x_SX: Tensor) -> Tensor:
        """Return tokens [S, ...] in the order of the block."""
        if self.slot_S is None:
            return x_SX
        restored: Tensor = _Empty.apply(x_SX, self.slot_S)
        return restored
