"""PyTorch's flash attention for CUDA, with variable lengths: no mask at all.

A chain attends to path and itself in one bottom-right causal call. A branching block
takes one causal call over its runs, and one call a depth for the descendants of a run
with that run (see block_shape.py). Grouped heads are the kernel's business. The kernel
comes with PyTorch; no further package is needed.
"""

# S = queries, T = keys, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from areal_dta.executor.block_layout import BlockShape, Range
from areal_dta.executor.kernels.base import (
    Gradients,
    Mask,
    Scoring,
    accumulation_dtype,
    merge,
)

_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How packed queries and keys fall into pairs that attend."""

    cumulative_q: Tensor
    """int32 [pairs + 1]."""
    cumulative_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool
    """Bottom-right aligned."""

    @classmethod
    def of(
        cls,
        queries: Sequence[Range],
        keys: Sequence[Range],
        causal: bool,
        device: torch.device,
    ) -> Lengths:
        q, k = ([end - start for start, end in ranges] for ranges in (queries, keys))

        def cumulative(lengths: list[int]) -> Tensor:
            ends = np.cumsum([0, *lengths], dtype=np.int32)
            return torch.from_numpy(ends).to(device)

        return cls(cumulative(q), cumulative(k), max(q), max(k), causal)


class Kernels(Protocol):
    """q: [S, N, H]; k, v: [T, K, H]; lse: [N, S], fp32."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        lengths: Lengths,
        scale: float,
    ) -> Gradients: ...


class AtenKernels:
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_arguments(lengths), return_debug_mask=False, scale=scale
        )
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        lengths: Lengths,
        scale: float,
    ) -> Gradients:
        # the state of the random numbers is read under dropout only
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads: Gradients = torch.ops.aten._flash_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            *_arguments(lengths),
            state,
            torch.empty(0, device=q.device),
            scale=scale,
        )
        return grads


def _arguments(lengths: Lengths) -> tuple[Any, ...]:
    no_dropout = 0.0
    return (
        lengths.cumulative_q,
        lengths.cumulative_k,
        lengths.longest_q,
        lengths.longest_k,
        no_dropout,
        lengths.causal,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a kernel: which queries and keys of the term take part."""

    lengths: Lengths
    rows: Tensor | None
    """int64, positions among the queries; None: all, in order."""
    columns: Tensor | None
    """Of the keys."""


class FlashCudaKernel:
    """fp16 and bf16 on GPUs of compute capability 8.0 and later."""

    name = "flash_cuda"
    joins_chains = True

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._kernels: Kernels = kernels or AtenKernels()

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
        width = q.shape[-1]
        return (
            q.device.type == "cuda"
            and q.dtype in _DTYPES
            and width == k.shape[-1] == v.shape[-1]
            and width <= _LARGEST_HEAD
            and width % 8 == 0
            and scoring.softcap is None
            and torch.cuda.get_device_capability(q.device) >= _LEAST_CAPABILITY
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_packed(x) for x in (q, k, v))
        first, *more = self._calls(mask, len(q), len(k), q.device)
        out, lse = self._kernels.forward(q, k, v, first.lengths, scoring.scale)
        for call in more:
            rows, columns = call.rows, call.columns
            assert rows is not None and columns is not None
            term, term_lse = self._kernels.forward(
                q[rows], k[columns], v[columns], call.lengths, scoring.scale
            )
            merged = merge(
                out[rows].transpose(0, 1),
                lse[:, rows],
                term.transpose(0, 1),
                term_lse,
            )
            out[rows], lse[:, rows] = merged[0].transpose(0, 1), merged[1]
        return out.transpose(0, 1)[None], lse[None]

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Mask,
        scoring: Scoring,
    ) -> Gradients:
        q, k, v, out, grad_out = (_packed(x) for x in (q, k, v, out, grad_out))
        lse, scale = lse[0], scoring.scale
        first, *more = self._calls(mask, len(q), len(k), q.device)
        grads = self._kernels.backward(
            grad_out, q, k, v, out, lse, first.lengths, scale
        )
        if more:  # many terms add into one key: fp32, as in the path's accumulators
            acc = accumulation_dtype(q.dtype)
            grad_q, grad_k, grad_v = (grad.to(acc) for grad in grads)
            for call in more:
                rows, columns = call.rows, call.columns
                assert rows is not None and columns is not None
                term = self._kernels.backward(
                    grad_out[rows],
                    q[rows],
                    k[columns],
                    v[columns],
                    out[rows],
                    lse[:, rows],
                    call.lengths,
                    scale,
                )
                grad_q.index_add_(0, rows, term[0].to(acc))
                grad_k.index_add_(0, columns, term[1].to(acc))
                grad_v.index_add_(0, columns, term[2].to(acc))
            grads = grad_q.to(q.dtype), grad_k, grad_v
        grad_q, grad_k, grad_v = (grad.transpose(0, 1)[None] for grad in grads)
        return grad_q, grad_k, grad_v

    def _calls(
        self, mask: Mask, num_queries: int, num_keys: int, device: torch.device
    ) -> list[_Call]:
        assert mask.matrix is None, "masks go to the masked-softmax kernel"
        key = ("calls", num_keys)
        if key not in mask.cache:
            whole = [(0, num_queries)], [(0, num_keys)]
            if mask.shape is None or mask.shape.is_chain:
                causal = mask.shape is not None
                lengths = Lengths.of(*whole, causal, device)
                mask.cache[key] = [_Call(lengths, None, None)]
            else:
                mask.cache[key] = _branching(mask.shape, device)
        found = mask.cache[key]
        assert isinstance(found, list)
        return found


def _branching(shape: BlockShape, device: torch.device) -> list[_Call]:
    runs = shape.run_ranges
    calls = [_Call(Lengths.of(runs, runs, True, device), None, None)]
    for level in shape.levels:
        lengths = Lengths.of(level.queries, level.keys, False, device)
        rows, columns = (
            torch.from_numpy(np.concatenate([np.arange(*r) for r in ranges])).to(device)
            for ranges in (level.queries, level.keys)
        )
        calls.append(_Call(lengths, rows, columns))
    return calls


def _packed(x_1NSH: Tensor) -> Tensor:
    """[S, N, H], a view."""
    return x_1NSH[0].transpose(0, 1)
