"""A log of the operators that a GPU would run, with FLOPs, bytes and launches of each.

Tensors are fake ones on CUDA (tests/executor/fake_cuda.py), so nothing is computed.
Where a kernel's work depends on values (cumulative lengths of flash attention), those
that were uploaded from the host are remembered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_dta.executor import fused
from areal_dta.executor.kernels import triton_ops

LAUNCHES = triton_ops.LAUNCHES | fused.LAUNCHES

_GEMMS = {"mm", "addmm", "bmm", "baddbmm"}
_FREE = {
    "_unsafe_view",
    "_reshape_alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "set_",
    "split",
    "split_with_sizes",
    "unbind",
    "view",
}
"""Operators that launch nothing, beside those that PyTorch marks as views."""
_FILLS = {"zeros", "zero_", "fill_", "new_zeros", "zeros_like", "ones", "full"}
_SELECTS = {"index_select", "embedding", "index", "gather"}
"""Operators that read as many elements as they return, and their indices."""
# Launches, and passes over the largest tensor, of operators that are several kernels.
_PASSES = {"logsumexp": (8, 6), "sort": (6, 8)}
_SORTING_LAUNCHES = 6
_FLASH_ROWS = 128
_FLASH_BACKWARD_LAUNCHES = 6


@dataclass(frozen=True, slots=True)
class Op:
    """One operator."""

    name: str
    kind: str
    """gemm, flash forward, flash backward, tree attention, element-wise, copies, fsdp
    or loss."""
    flops: float = 0.0
    num_bytes: float = 0.0
    launches: int = 1
    shape: tuple[int, ...] = ()
    """Rows, columns and length of the sum of a matrix product."""
    batch: int = 1
    tiles: float = 0.0
    """Independent pieces of work of flash attention."""
    is_half: bool = True
    syncs: int = 0


@dataclass(slots=True)
class Segment:
    """Consecutive operators of one kind of pass: between two, host and device meet."""

    is_backward: bool
    ops: list[Op] = field(default_factory=list)


class OpLog(TorchDispatchMode):
    """Context manager that records what is asked of CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[Segment] = [Segment(False)]
        self._host_values: dict[int, tuple[Tensor, np.ndarray]] = {}
        self._is_silent = False
        self.live: Any = None
        """Counts the bytes of what operators make (`bench.measure.LiveBytes`)."""

    @property
    def ops(self) -> list[Op]:
        return [op for segment in self.segments for op in segment.ops]

    def begin(self, is_backward: bool) -> None:
        """Start a segment."""
        if self.segments[-1].ops or self.segments[-1].is_backward != is_backward:
            self.segments.append(Segment(is_backward))

    def add(self, op: Op) -> None:
        if not self._is_silent:
            self.segments[-1].ops.append(op)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Context manager in which nothing is recorded."""
        before, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = before

    def remember(self, tensor: Tensor, values: np.ndarray) -> None:
        """Keep the values of an uploaded tensor."""
        self._host_values[id(tensor)] = tensor, values  # the tensor stays alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        made = [out] if isinstance(out, Tensor) else list(_tensors(out))
        if self.live is not None:
            for x in made:
                self.live.hold(x)
        if not self._is_silent and (op := self._op(func, args, kwargs or {}, made)):
            self.segments[-1].ops.extend([op] if isinstance(op, Op) else op)
        return out

    def _op(
        self, func: Any, args: Any, kwargs: Any, made: list[Tensor]
    ) -> Op | list[Op] | None:
        namespace, _, name = func._schema.name.partition("::")
        if name in _FREE or namespace == "prim":
            return None
        given = [*_tensors(args), *_tensors(kwargs.values())]
        if not any(x.device.type == "cuda" for x in [*made, *given]):
            return None
        if name in _GEMMS:
            tensors = tuple(x for x in args if isinstance(x, Tensor))
            return _gemm(name, tensors, made[0])
        if namespace == "areal_dta":
            return self._own(name, args, given, made)
        if name == "_flash_attention_forward":
            return self._flash(name, args, kwargs, is_forward=True)
        if name == "_flash_attention_backward":
            return self._flash(name, args[1:], kwargs, is_forward=False)
        return _element_wise(name, given, made)

    def _own(
        self, name: str, args: Any, given: list[Tensor], made: list[Tensor]
    ) -> list[Op]:
        """Count the project's own kernels: fused layers, and tree attention."""
        moved = sum(map(_bytes, (*given, *made)))
        if name not in ("tree_attention", "tree_attention_backward"):
            launches = LAUNCHES[f"areal_dta::{name}"]
            return [Op(name, "element-wise", 0.0, moved, launches)]
        is_forward = name == "tree_attention"
        q, k, _, path_k = args[:4] if is_forward else args[1:5]
        last, tiling = args[5 if is_forward else 10], args[-1]
        num_queries, num_heads, width = q.shape[2], q.shape[1], q.shape[3]
        num_path = 0 if path_k is None else path_k.shape[2]
        last_S = self._host_values[id(last)][1]
        # Each key of the block is seen by its subtree, each of the path by all.
        pairs = float((last_S - np.arange(num_queries)).sum()) + num_queries * num_path
        flops = 2.0 * pairs * num_heads * width  # of one product
        num_kv_heads = k.shape[1]
        rows = num_queries * num_heads // num_kv_heads
        of_rows = float(-(-rows // tiling[0]) * num_kv_heads)
        kind = "tree attention"
        if is_forward:
            return [Op("tree_forward", kind, 2 * flops, moved, tiles=of_rows)]
        keys = tiling[3]
        of_keys = float((-(-num_path // keys) + -(-num_queries // keys)) * num_kv_heads)
        # Scores and their gradients twice: for dq, then for dk and dv. The path's
        # accumulators are read and written.
        moved += sum(_bytes(x) for x in args[6:8] if x is not None)
        return [
            Op("tree_backward", kind, 3 * flops, moved / 2, tiles=of_rows),
            Op("tree_backward", kind, 4 * flops, moved / 2, tiles=of_keys),
        ]

    def _flash(self, name: str, args: Any, kwargs: Any, is_forward: bool) -> Op:
        """Count attended pairs, and the tiles over which the kernel spreads.

        The backward is PyTorch's: it works per query head, with dq in fp32 and with dk
        and dv of each query head, which are summed per key head.
        """
        q, k, v, *rest = args
        cumulative_q, cumulative_k = rest[:2] if is_forward else rest[2:4]
        num_queries, num_heads, width = q.shape[-3:]
        num_keys, num_kv_heads, _ = k.shape[-3:]
        if cumulative_q is None:  # one pair, as a batch of one
            lengths = [np.array([num_queries]), np.array([num_keys])]
        else:
            lengths = [
                np.diff(self._host_values[id(x)][1].astype(np.int64))
                for x in (cumulative_q, cumulative_k)
            ]
        is_causal = rest[5] if is_forward else rest[7]
        pairs = attended(*lengths, is_causal, kwargs.get("window_size_left"))
        e = q.element_size()
        queries, keys = num_queries * num_heads * width, num_keys * num_kv_heads * width
        products, moved = (2, e * (2 * queries + 2 * keys))
        launches, kind = 1, "flash forward"
        of_tiles = lengths[0]
        if not is_forward:
            of_tiles, products = lengths[1], 5
            launches, kind = _FLASH_BACKWARD_LAUNCHES, "flash backward"
            expanded = num_keys * num_heads * width
            moved = e * (4 * queries + 2 * keys)  # the inputs, twice the products
            moved += 4 * queries * 3 + e * queries  # dq in fp32: zeroed, added, rounded
            moved += e * (2 * 2 * expanded + 2 * keys)  # dk, dv per query head, summed
        tiles = float(np.ceil(of_tiles / _FLASH_ROWS).sum()) * num_heads
        flops = 2.0 * products * pairs * num_heads * width
        return Op(name, kind, flops, float(moved), launches, tiles=tiles)


def _tensors(tree: Any) -> Iterator[Tensor]:
    for x in tree if isinstance(tree, Iterable) else ():
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def attended(
    queries: np.ndarray, keys: np.ndarray, is_causal: bool, window_left: int | None
) -> float:
    """Return the number of (query, key) pairs over all pairs of ranges.

    Causal masks are aligned at the bottom right; ``window_left`` further keys are seen.
    """
    if not is_causal:
        return float((queries * keys).sum())
    total = 0.0
    for q, k in zip(queries.tolist(), keys.tolist(), strict=True):
        last = np.arange(k - q + 1, k + 1)  # keys that each query sees
        if window_left is not None and window_left >= 0:
            last = np.minimum(last, window_left + 1)
        total += float(last.clip(min=0).sum())
    return total


def num_unique(x: Tensor) -> int:
    """Return the elements that a kernel has to move: those of broadcasts count once."""
    return math.prod(n for n, s in zip(x.shape, x.stride(), strict=True) if s != 0)


def _bytes(x: Tensor) -> float:
    return float(num_unique(x) * x.element_size())


def _gemm(name: str, args: Any, out: Tensor) -> Op:
    a, b = args[-2:] if name in ("addmm", "baddbmm") else args[:2]
    rows, length, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = a.shape[0] if a.dim() == 3 else 1
    return Op(
        name,
        "gemm",
        2.0 * batch * rows * columns * length,
        sum(map(_bytes, (a, b, out))),
        shape=(rows, columns, length),
        batch=batch,
        is_half=a.dtype in (torch.bfloat16, torch.float16),
    )


def _element_wise(name: str, given: list[Tensor], made: list[Tensor]) -> Op:
    out = sum(map(_bytes, made))
    own = {id(x) for x in made}
    read = sum(_bytes(x) for x in given if id(x) not in own)
    is_in_place = any(id(x) in own for x in given)
    plain, launches = name.rstrip("_"), 1
    if name in _FILLS:
        moved = out
    elif plain in _SELECTS:
        moved = 2 * out + sum(_bytes(x) for x in given if not x.is_floating_point())
    elif plain in ("index_add", "index_copy", "index_put", "scatter_add"):
        source = given[-1]  # what is added or put
        moved = 3 * max(_bytes(source), 1.0)
        launches = _SORTING_LAUNCHES if plain == "index_put" else 1
    elif name == "embedding_dense_backward":
        moved, launches = out + _bytes(given[0]) * 2, _SORTING_LAUNCHES
    elif name in _PASSES:
        launches, passes = _PASSES[name]
        moved = passes * read + out
    elif plain == "copy":
        moved = _bytes(given[-1]) + out
    elif plain in ("_log_softmax", "_softmax"):
        moved = 2 * read + out
    else:
        moved = read + out * (2 if is_in_place else 1)
    is_copy = plain in ("copy", "_to_copy", "clone", "cat", "contiguous", *_SELECTS)
    kind = "copies" if is_copy else "element-wise"
    return Op(name, kind, 0.0, float(moved), launches)
