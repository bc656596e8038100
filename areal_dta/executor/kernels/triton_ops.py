"""Operators of tree attention in Triton, known to PyTorch by name and by the shapes of
what they return: runs on meta and fake tensors see them, and need no Triton.

A call of attention starts one program forward and two backward; once per block, and
kind of layer, one more lists tiles.
"""

# S = queries, P = path tokens, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from areal_dta.executor.kernels.base import Gradients, accumulation_dtype

_LIST_CHUNK = 64  # key tiles that are looked at together

LAUNCHES = {
    "areal_dta::tree_tiles": 1,
    "areal_dta::tree_attention": 1,
    "areal_dta::tree_attention_backward": 2,
}
"""Kernels that a call of each operator starts."""


_library = torch.library.Library("areal_dta", "DEF")
_library.define(
    "tree_tiles(Tensor last, Tensor depth, int group, int window, int rows, int keys) "
    "-> (Tensor, Tensor)"
)
_COMMON = (
    "Tensor last, Tensor depth, Tensor tiles, Tensor counts, int path_start, "
    "float scale, float softcap, int window, int[] tiling"
)
_library.define(
    "tree_attention(Tensor q, Tensor k, Tensor v, Tensor? path_k, Tensor? path_v, "
    f"{_COMMON}) -> (Tensor, Tensor)"
)
_library.define(
    "tree_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, "
    "Tensor? path_k, Tensor? path_v, Tensor(a!)? path_grad_k, Tensor(b!)? path_grad_v, "
    f"Tensor out, Tensor lse, {_COMMON}) -> (Tensor, Tensor, Tensor)"
)


@cache
def is_installed() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@cache
def _programs() -> dict[str, Any]:
    """Return the programs by name; imports Triton."""
    from areal_dta.executor.kernels import triton_backward, triton_forward

    return {
        "list_tiles": triton_forward.list_tiles,
        "forward": triton_forward.forward,
        "backward_rows": triton_backward.backward_rows,
        "backward_keys": triton_backward.backward_keys,
    }


@cache
def is_interpreted() -> bool:
    """Return whether Triton runs its programs in Python (TRITON_INTERPRET=1)."""
    if not is_installed():
        return False
    from triton.runtime.jit import JITFunction

    return not isinstance(_programs()["forward"], JITFunction)


def _tree_tiles(
    last: Tensor, depth: Tensor, group: int, window: int, rows: int, keys: int
) -> tuple[Tensor, Tensor]:
    tiles, counts = _tree_tiles_meta(last, depth, group, window, rows, keys)
    with on_device(last):
        _programs()["list_tiles"][(len(tiles),)](
            last,
            depth,
            tiles,
            counts,
            len(last),
            tiles.shape[1],
            GROUP=group,
            WINDOW=window,
            BLOCK_M=rows,
            BLOCK_N=keys,
            CHUNK=_LIST_CHUNK,
        )
    return tiles, counts


def _tree_tiles_meta(
    last: Tensor, depth: Tensor, group: int, window: int, rows: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Return int32 [row tiles, key tiles], and how many of each row count."""
    num_tiles = -(-len(last) * group // rows)
    tiles = last.new_empty(num_tiles, -(-len(last) // keys), dtype=torch.int32)
    return tiles, last.new_empty(num_tiles, dtype=torch.int32)


def _tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    path_k: Tensor | None,
    path_v: Tensor | None,
    last: Tensor,
    depth: Tensor,
    tiles: Tensor,
    counts: Tensor,
    path_start: int,
    scale: float,
    softcap: float,
    window: int,
    tiling: list[int],
) -> tuple[Tensor, Tensor]:
    q, k, v = dense_heads(q), dense_heads(k), dense_heads(v)
    out, lse = _tree_attention_meta(q)
    num_path = 0 if path_k is None else path_k.shape[2]
    path_k, path_v = (
        (k if path_k is None else path_k),
        (v if path_v is None else path_v),
    )
    rows, keys, _, _, warps, _, stages = tiling
    with on_device(q):
        _programs()["forward"][(len(counts), k.shape[1])](
            q,
            k,
            v,
            path_k,
            path_v,
            last,
            depth,
            tiles,
            counts,
            out,
            lse,
            *map(token_strides, (q, k, v, path_k, path_v, out)),
            q.shape[2],
            num_path,
            path_start,
            tiles.shape[1],
            **_constants(q, k, scale, softcap, window, rows, keys),
            num_warps=warps,
            num_stages=stages,
        )
    return out, lse


def _tree_attention_meta(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    # The memory layout [1, S, N, H] is what the model reads: no copy afterwards.
    _, num_heads, num_queries, width = q.shape
    out = q.new_empty(1, num_queries, num_heads, width).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def _tree_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    path_k: Tensor | None,
    path_v: Tensor | None,
    path_grad_k: Tensor | None,
    path_grad_v: Tensor | None,
    out: Tensor,
    lse: Tensor,
    last: Tensor,
    depth: Tensor,
    tiles: Tensor,
    counts: Tensor,
    path_start: int,
    scale: float,
    softcap: float,
    window: int,
    tiling: list[int],
) -> Gradients:
    grad_out, q, k, v, out = map(dense_heads, (grad_out, q, k, v, out))
    lse = lse.contiguous()
    grad_q, grad_k, grad_v = _tree_attention_backward_meta(grad_out, q, k, v)
    num_path = 0 if path_k is None else path_k.shape[2]
    path_k, path_v = (
        (k if path_k is None else path_k),
        (v if path_v is None else path_v),
    )
    if path_grad_k is None or path_grad_v is None:
        assert num_path == 0
        path_grad_k, path_grad_v = grad_k, grad_v
    assert path_grad_k.stride() == path_grad_v.stride()
    delta = torch.empty_like(lse)
    rows, keys, backward_rows, backward_keys, *warps, stages = tiling
    sizes = (q.shape[2], num_path, path_start)
    inputs = (q, k, v, path_k, path_v)
    with on_device(q):
        _programs()["backward_rows"][(len(counts), k.shape[1])](
            grad_out,
            *inputs,
            out,
            lse,
            last,
            depth,
            tiles,
            counts,
            grad_q,
            delta,
            *map(token_strides, (grad_out, *inputs, out, grad_q)),
            *sizes,
            tiles.shape[1],
            **_constants(q, k, scale, softcap, window, rows, keys),
            num_warps=warps[0],
            num_stages=stages,
        )
        num_tiles = -(-num_path // backward_keys) + -(-q.shape[2] // backward_keys)
        _programs()["backward_keys"][(num_tiles, k.shape[1])](
            grad_out,
            *inputs,
            lse,
            last,
            depth,
            delta,
            grad_k,
            grad_v,
            path_grad_k,
            path_grad_v,
            *map(token_strides, (grad_out, *inputs, grad_k, path_grad_k)),
            *sizes,
            **_constants(q, k, scale, softcap, window, backward_rows, backward_keys),
            num_warps=warps[1],
            num_stages=stages,
        )
    return grad_q, grad_k, grad_v


def _tree_attention_backward_meta(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> Gradients:
    # In the layout of the projections that made them: no copy afterwards.
    grads = [
        x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
        for x in (q, k, v)
    ]
    return grads[0], grads[1], grads[2]


def _constants(
    q: Tensor,
    k: Tensor,
    scale: float,
    softcap: float,
    window: int,
    rows: int,
    keys: int,
) -> dict[str, Any]:
    width = q.shape[3]
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "SCALE": scale,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "WIDTH": width,
        "PADDED": max(16, 1 << (width - 1).bit_length()),
        "BLOCK_M": rows,
        "BLOCK_N": keys,
        "UPCAST": q.device.type == "cpu" and q.dtype == torch.bfloat16,
    }


def token_strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of a token and of a head."""
    return x.stride(2), x.stride(1)


def dense_heads(x: Tensor) -> Tensor:
    """Return a tensor whose heads are each in one piece; mostly the one given."""
    return x if x.stride(-1) == 1 else x.contiguous()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


for _name, _run, _shapes in (
    ("tree_tiles", _tree_tiles, _tree_tiles_meta),
    ("tree_attention", _tree_attention, _tree_attention_meta),
    (
        "tree_attention_backward",
        _tree_attention_backward,
        _tree_attention_backward_meta,
    ),
):
    _library.impl(_name, _run, "CPU")
    _library.impl(_name, _run, "CUDA")
    _library.impl(_name, _shapes, "Meta")
