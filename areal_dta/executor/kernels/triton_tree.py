"""Tree attention in Triton: path and block in one call, without levels or merges.

The operators are in `triton_ops.py`, their programs in `triton_forward.py` and
`triton_backward.py`. They are driven by the last descendant of each token
(`BlockShape.last_S`). docs/kernels.md has the design, its cost and how it is tested.
"""

# S = queries, P = path tokens, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_dta.executor.kernels.base import Gradients, Mask, Scoring, Term
from areal_dta.executor.kernels.triton_ops import is_installed, is_interpreted

_MIN_CAPABILITY = (8, 0)
_MAX_HEAD_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of tiles, and how the GPU runs them."""

    rows: int
    """Query rows of a tile in passes over rows: query heads times queries."""
    keys: int
    """Keys of a tile there."""
    backward_rows: int
    """Rows of a tile in the pass over keys."""
    backward_keys: int
    warps: int = 4
    backward_warps: int = 4
    """Warps of the pass over keys, which holds two gradients in registers."""
    stages: int = 2


def choose_tiling(num_rows: int, num_kv_heads: int, q: Tensor) -> Tiling:
    """Return tiles for ``num_rows`` rows per key head.

    They fit the registers and the shared memory of compute capability 8.0 and 9.0, as
    the compiler tells (docs/kernels.md). Few rows get small tiles, so that more
    multiprocessors have one.
    """
    width = q.shape[-1]
    if q.dtype.itemsize > 2:
        return Tiling(32, 32, 32, 32)
    if width > 128:
        return Tiling(64, 32, 32, 64, warps=8, backward_warps=8)
    many = num_rows // 128 * num_kv_heads >= 264  # two per multiprocessor of an H100
    rows, warps = (128, 8) if many else (64, 4)
    if width > 64:
        return Tiling(rows, 64, 64, 64, warps, backward_warps=8)
    return Tiling(rows, 64, 64, 64, warps, stages=3)


class TritonTreeKernel:
    """Serves windows and soft caps; fp64 in Triton's interpreter only."""

    name = "triton_tree"
    joins_chains = False
    takes_path = True
    needs = (
        "Triton, a GPU of compute capability 8.0 or later (or TRITON_INTERPRET=1), and "
        "equal head sizes up to 256"
    )

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
        width = q.shape[-1]
        if not width == k.shape[-1] == v.shape[-1] <= _MAX_HEAD_DIM:
            return False
        if not is_installed():
            return False
        if q.device.type != "cuda":
            return q.device.type == "meta" or is_interpreted()
        capability = torch.cuda.get_device_capability(q.device)
        return q.dtype in _DTYPES and capability >= _MIN_CAPABILITY

    def forward(self, q: Tensor, term: Term) -> tuple[Tensor, Tensor]:
        path = term.path
        out, lse = torch.ops.areal_dta.tree_attention(
            q,
            term.k,
            term.v,
            path and path.k,
            path and path.v,
            *_common(q, term),
        )
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, term: Term
    ) -> Gradients:
        """Return dq, dk, dv of the block; add those of the path to its accumulators."""
        path = term.path
        grads: Gradients = torch.ops.areal_dta.tree_attention_backward(
            grad_out,
            q,
            term.k,
            term.v,
            path and path.k,
            path and path.v,
            path and path.grad_k,
            path and path.grad_v,
            out,
            lse,
            *_common(q, term),
        )
        return grads


def _common(q: Tensor, term: Term) -> tuple[Any, ...]:
    """Return the arguments that both operators take, from ``last`` on."""
    mask, scoring = term.mask, term.scoring
    assert mask.shape is not None
    num_queries, num_kv_heads = q.shape[2], term.k.shape[1]
    group, window = q.shape[1] // num_kv_heads, mask.window or 0
    tiling = choose_tiling(num_queries * group, num_kv_heads, q)
    last, depth = _last(mask, q.device), mask.depth_S
    depth = last if depth is None else depth
    # Once for all layers that are alike.
    key = ("tiles", group, window, tiling.rows, tiling.keys)
    if key not in mask.cache:
        mask.cache[key] = torch.ops.areal_dta.tree_tiles(
            last, depth, group, window, tiling.rows, tiling.keys
        )
    found: Any = mask.cache[key]
    tiles, counts = found
    start = 0 if term.path is None else term.path.start
    sizes = [tiling.rows, tiling.keys, tiling.backward_rows, tiling.backward_keys]
    sizes += [tiling.warps, tiling.backward_warps, tiling.stages]
    softcap = scoring.softcap or 0.0
    return last, depth, tiles, counts, start, scoring.scale, softcap, window, sizes


def _last(mask: Mask, device: torch.device) -> Tensor:
    assert mask.shape is not None
    found = mask.arrays.get((mask.shape.num_tokens, "last"))
    if found is None:
        if "last" not in mask.cache:
            mask.cache["last"] = torch.from_numpy(mask.shape.last_S).to(device)
        found = mask.cache["last"]  # type: ignore[assignment]
    assert found is not None
    return found
