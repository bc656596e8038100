"""PyTorch's flash attention for CPU.

The kernel computes what a mask hides, and most of what ``is_causal`` hides, so a block
is covered by tiles of neighbouring queries with the keys that they see. A tile's query
heads are folded into the query length: grouped heads cost no copies of keys.
"""

# S = queries, T = keys, N = query heads, K = key/value heads, G = N / K, H = head dim

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_dta.executor.kernels.base import Gradients, Scoring, Term, accumulation_dtype
from areal_dta.executor.layout.block_layout import Range

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FlashCpuKernel:
    """Exact in fp64 too, so parity tests run on it."""

    name = "flash_cpu"
    joins_chains = False
    takes_path = False
    needs = "a CPU, equal head sizes and no soft cap"

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
        same_width = q.shape[-1] == k.shape[-1] == v.shape[-1]
        return q.device.type == "cpu" and same_width and scoring.softcap is None

    def forward(self, q: Tensor, term: Term) -> tuple[Tensor, Tensor]:
        if term.mask.shape is None:
            return _attend(q, term.k, term.v, _whole_bias(term, q), term.scoring.scale)
        _, num_heads, num_queries, width = q.shape
        # The memory layout [1, S, N, H] is what the model reads: no copy afterwards.
        out = q.new_empty(1, num_queries, num_heads, width).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        for index, tile in enumerate(term.mask.shape.tiles):
            rows = slice(*tile.queries)
            out[:, :, rows], lse[:, :, rows] = _attend(
                q[:, :, rows],
                _gather(term.k, tile.keys),
                _gather(term.v, tile.keys),
                _tile_bias(term, index, q),
                term.scoring.scale,
            )
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, term: Term
    ) -> Gradients:
        k, v, scale = term.k, term.v, term.scoring.scale
        if term.mask.shape is None:
            bias = _whole_bias(term, q)
            return _attend_backward(grad_out, q, k, v, out, lse, bias, scale)
        # Several tiles add into one key: in the accumulation dtype.
        acc = accumulation_dtype(q.dtype)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(k, dtype=acc), torch.zeros_like(v, dtype=acc)
        for index, tile in enumerate(term.mask.shape.tiles):
            rows = slice(*tile.queries)
            grads = _attend_backward(
                grad_out[:, :, rows],
                q[:, :, rows],
                _gather(k, tile.keys),
                _gather(v, tile.keys),
                out[:, :, rows],
                lse[:, :, rows],
                _tile_bias(term, index, q),
                scale,
            )
            grad_q[:, :, rows] = grads[0]
            _scatter_add(grad_k, tile.keys, grads[1])
            _scatter_add(grad_v, tile.keys, grads[2])
        return grad_q, grad_k, grad_v


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = _forward(_folded(q, k), k, v, 0.0, False, attn_mask=bias, scale=scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    scale: float,
) -> Gradients:
    do, folded, out = (_folded(x, k) for x in (grad_out, q, out))
    lse = lse.reshape(folded.shape[:3])
    options = {"attn_mask": bias, "scale": scale}
    grad_q, *rest = _backward(do, folded, k, v, out, lse, 0.0, False, **options)
    return grad_q.reshape(q.shape), *rest


def _folded(q: Tensor, k: Tensor) -> Tensor:
    """[1, K, G * S, H]: the queries of all heads that share keys, end to end."""
    return q.reshape(1, k.shape[1], -1, q.shape[3])


def _gather(x: Tensor, ranges: Sequence[Range]) -> Tensor:
    parts = [x[:, :, start:end] for start, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _scatter_add(total: Tensor, ranges: Sequence[Range], part: Tensor) -> None:
    at = 0
    for start, end in ranges:
        total[:, :, start:end] += part[:, :, at : at + end - start]
        at += end - start


def _tile_bias(term: Term, index: int, q: Tensor) -> Tensor | None:
    """Additive bias of a tile, [1, 1, G * S, T]; made once for all layers alike."""
    assert term.mask.shape is not None
    visible_QT = term.mask.shape.tiles[index].visible_QT
    if visible_QT is None:
        return None
    group = q.shape[1] // term.k.shape[1]
    key = (index, q.dtype, group)
    if key not in term.mask.cache:
        term.mask.cache[key] = _bias(torch.from_numpy(visible_QT), q.dtype, group)
    found = term.mask.cache[key]
    assert isinstance(found, Tensor)
    return found


def _whole_bias(term: Term, q: Tensor) -> Tensor | None:
    if term.mask.matrix is None:
        return None
    return _bias(term.mask.matrix, q.dtype, q.shape[1] // term.k.shape[1])


def _bias(visible_ST: Tensor, dtype: torch.dtype, group: int) -> Tensor:
    bias = torch.zeros(visible_ST.shape, dtype=dtype)
    bias = bias.masked_fill_(~visible_ST, -torch.inf)
    return bias.repeat(group, 1)[None, None]
