"""PyTorch's flash attention for CUDA, with variable lengths: no mask at all.

A chain attends to path and itself in one bottom-right causal call. A branching block
takes one causal call over its runs, and one call per depth for the descendants of a run
with that run (see block_layout.py). The kernel handles grouped heads. It comes with
PyTorch; no further package is needed.
"""

# S = queries, T = keys, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_dta.executor.kernels.base import (
    Gradients,
    Mask,
    Scoring,
    Term,
    accumulation_dtype,
    merge,
)
from areal_dta.executor.layout.block_layout import BlockShape, Range

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How packed queries and keys fall into pairs that attend."""

    cumulative_q: Tensor
    """int32 [pairs + 1]."""
    cumulative_k: Tensor
    max_q: int
    max_k: int
    is_causal: bool
    """Bottom-right aligned."""
    window: int | None = None
    """Number of keys that a query sees under causal attention; None: all."""

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of PyTorch's operators."""
        if self.window is None:
            return {}
        return {"window_size_left": self.window - 1, "window_size_right": 0}

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Positional arguments of PyTorch's operators; the 0.0 is the dropout."""
        q, k = self.cumulative_q, self.cumulative_k
        return q, k, self.max_q, self.max_k, 0.0, self.is_causal


@dataclass(frozen=True, slots=True)
class _Call:
    """One more call of the operator, on some of the queries and keys."""

    lengths: Lengths
    rows: Tensor | slice
    """Positions among the queries; int64 where they are not one range."""
    columns: Tensor | slice
    """Positions among the keys."""


class FlashCudaKernel:
    """fp16 and bf16 on GPUs of compute capability 8.0 and later."""

    name = "flash_cuda"
    joins_chains = True
    takes_path = False
    needs = (
        "a GPU of compute capability 8.0 or later, fp16 or bf16, equal head sizes "
        "up to 256 in steps of 8, and no soft cap"
    )

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
        width = q.shape[-1]
        return (
            q.device.type == "cuda"
            and q.dtype in _DTYPES
            and width == k.shape[-1] == v.shape[-1]
            and width <= _MAX_HEAD_DIM
            and width % 8 == 0
            and scoring.softcap is None
            and torch.cuda.get_device_capability(q.device) >= _MIN_CAPABILITY
        )

    def forward(self, q: Tensor, term: Term) -> tuple[Tensor, Tensor]:
        q, k, v = (_packed(x) for x in (q, term.k, term.v))
        scale = term.scoring.scale
        first, more = _calls(term.mask, len(q), len(k), q.device)
        out, lse = self.attend(q, k, v, first, scale)
        if more:  # rounded once, when all calls have been merged
            out = out.to(accumulation_dtype(q.dtype))
        for call in more:
            rows, columns = call.rows, call.columns
            part, part_lse = self.attend(
                q[rows], k[columns], v[columns], call.lengths, scale
            )
            merged, lse[:, rows] = merge(
                out[rows].transpose(0, 1), lse[:, rows], part.transpose(0, 1), part_lse
            )
            out[rows] = merged.transpose(0, 1)
        return out.transpose(0, 1)[None], lse[None]

    def backward(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, term: Term
    ) -> Gradients:
        inputs = (grad_out, q, term.k, term.v, out)
        grad_out, q, k, v, out = (_packed(x) for x in inputs)
        lse, scale = lse[0], term.scoring.scale
        first, more = _calls(term.mask, len(q), len(k), q.device)
        grads = self.attend_backward(grad_out, q, k, v, out, lse, first, scale)
        if more:  # many calls add into one key: fp32, as in the path's accumulators
            acc = accumulation_dtype(q.dtype)
            grad_q, grad_k, grad_v = (grad.to(acc) for grad in grads)
            for call in more:
                rows, columns = call.rows, call.columns
                part = self.attend_backward(
                    grad_out[rows],
                    q[rows],
                    k[columns],
                    v[columns],
                    out[rows],
                    lse[:, rows],
                    call.lengths,
                    scale,
                )
                _add_at(grad_q, rows, part[0].to(acc))
                _add_at(grad_k, columns, part[1].to(acc))
                _add_at(grad_v, columns, part[2].to(acc))
            grads = grad_q.to(q.dtype), grad_k, grad_v
        grad_q, grad_k, grad_v = (grad.transpose(0, 1)[None] for grad in grads)
        return grad_q, grad_k, grad_v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Call the operator. q: [S, N, H]; k, v: [T, K, H]; lse: [N, S], fp32."""
        arguments = lengths.arguments
        is_one_pair = len(lengths.cumulative_q) == 2
        if is_one_pair:
            # As a batch of one: the operator then splits the keys over multiprocessors
            # where there are few queries, which it does not do for packed ones.
            q, k, v = q[None], k[None], v[None]
            arguments = None, None, *arguments[2:]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            *arguments,
            return_debug_mask=False,
            scale=scale,
            **lengths.options,
        )
        return (out[0], lse[0]) if is_one_pair else (out, lse)

    def attend_backward(
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
        # The state of the random number generator is read under dropout only.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        saved = (grad_out, q, k, v, out, lse.contiguous())
        grads: Gradients = torch.ops.aten._flash_attention_backward(
            *saved,
            *lengths.arguments,
            state,
            unused,
            scale=scale,
            **lengths.options,
        )
        return grads


def call_arrays(
    shape: BlockShape | None, num_queries: int, num_keys: int
) -> dict[tuple[int, str], np.ndarray]:
    """Return what the calls of a term need on the device, by (keys, name): cumulative
    lengths (q, k), and per level positions that are not one range (rows, columns).

    Args:
        shape: of the block if the keys are its own; None for the path.
    """
    arrays: dict[str, np.ndarray] = {}
    if shape is None or shape.is_chain:
        arrays = {
            "q": _cumulative([(0, num_queries)]),
            "k": _cumulative([(0, num_keys)]),
        }
    else:
        arrays = dict.fromkeys("qk", _cumulative(shape.run_ranges))
        for n, level in enumerate(shape.levels):
            arrays |= {f"q{n}": _cumulative(level.queries)}
            arrays |= {f"k{n}": _cumulative(level.keys)}
            for name, ranges in (("rows", level.queries), ("columns", level.keys)):
                if _one_range(ranges) is None:
                    positions = [np.arange(*r) for r in ranges]
                    arrays[f"{name}{n}"] = np.concatenate(positions)
    return {(num_keys, name): array for name, array in arrays.items()}


def _calls(
    mask: Mask, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Lengths, list[_Call]]:
    """Lengths of the call over all queries and keys, and the calls that follow it."""
    assert mask.matrix is None, "matrices go to the masked-softmax kernel"
    key = ("calls", num_keys)
    if key not in mask.cache:
        mask.cache[key] = _make_calls(mask, num_queries, num_keys, device)
    found: Any = mask.cache[key]
    return found


def _make_calls(
    mask: Mask, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Lengths, list[_Call]]:
    shape, arrays = mask.shape, mask.arrays
    if (num_keys, "q") not in arrays:
        made = call_arrays(shape, num_queries, num_keys)
        arrays = {k: torch.from_numpy(array).to(device) for k, array in made.items()}
    q, k = arrays[num_keys, "q"], arrays[num_keys, "k"]
    if shape is None or shape.is_chain:
        is_causal = shape is not None
        return Lengths(q, k, num_queries, num_keys, is_causal, mask.window), []
    longest = _longest(shape.run_ranges)
    more = []
    for n, level in enumerate(shape.levels):
        lengths = Lengths(
            arrays[num_keys, f"q{n}"],
            arrays[num_keys, f"k{n}"],
            _longest(level.queries),
            _longest(level.keys),
            is_causal=False,
        )
        rows = _one_range(level.queries) or arrays[num_keys, f"rows{n}"]
        columns = _one_range(level.keys) or arrays[num_keys, f"columns{n}"]
        more.append(_Call(lengths, rows, columns))
    return Lengths(q, k, longest, longest, True), more


def _cumulative(ranges: Sequence[Range]) -> np.ndarray:
    return np.cumsum([0, *(end - start for start, end in ranges)], dtype=np.int32)


def _longest(ranges: Sequence[Range]) -> int:
    return max(end - start for start, end in ranges)


def _one_range(ranges: Sequence[Range]) -> slice | None:
    """Return ascending ranges as one slice if no gap lies between them."""
    if any(a[1] != b[0] for a, b in pairwise(ranges)):
        return None
    return slice(ranges[0][0], ranges[-1][1])


def _add_at(total: Tensor, at: Tensor | slice, part: Tensor) -> None:
    if isinstance(at, slice):
        total[at] += part
    else:
        total.index_add_(0, at, part)


def _packed(x_1NSH: Tensor) -> Tensor:
    """[S, N, H], a view."""
    return x_1NSH[0].transpose(0, 1)
