"""The interface of an attention kernel: one term of a block's attention.

A term is the block's queries against one set of keys, with its log-sum-exp (LSE): the
path, the block itself, or for a chain both at once. executor/attention.py merges terms
by their LSEs. ``backward`` receives the merged output and LSE, which makes the
gradients of each term exact (as in ring attention: Liu et al., arXiv 2310.01889).

Masks are bounded by block x (path + block); most terms need none.
"""

# S = queries, T = keys, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from areal_dta.executor.layout.block_layout import BlockShape

Gradients = tuple[Tensor, Tensor, Tensor]


class Mask:
    """Which queries see which keys: all, those that ``shape`` implies, or ``visible``.

    All layers of a block share one mask; kernels keep what they derive from it in
    ``cache``, where other layers and the backward find it again.

    Args:
        shape: the keys are the block's own. For chains, path tokens may come before
            them, which all queries see.
        visible: bool [S, T], True where a query sees a key.
        window: with a chain or depths: queries see so many tokens, themselves included.
        depth_S: int64 [S], depth of each token of the block.
        arrays: on the device, by (number of keys, name), what kernels would otherwise
            have to copy there.
    """

    def __init__(
        self,
        shape: BlockShape | None = None,
        visible: Tensor | None = None,
        window: int | None = None,
        arrays: Mapping[tuple[int, str], Tensor] | None = None,
        depth_S: Tensor | None = None,
    ) -> None:
        assert shape is None or visible is None
        assert window is None or (
            shape is not None and (shape.is_chain or depth_S is not None)
        )
        self.shape, self.matrix, self.window = shape, visible, window
        self.depth_S = depth_S
        self.arrays = arrays or {}
        self.cache: dict[object, object] = {}

    def visible(self, num_keys: int, device: torch.device) -> Tensor | None:
        """Return the whole matrix, or None if every query sees every key."""
        if self.shape is None:
            return self.matrix
        num_above = num_keys - self.shape.num_tokens
        if num_above not in self.cache:
            num_own = self.shape.num_tokens
            last_T = self.arrays.get((num_own, "last"))
            if last_T is None:
                last_T = torch.from_numpy(self.shape.last_S).to(device)
            # A query sees what comes before it and whose subtree has not ended.
            at_T = torch.arange(num_own, device=device)
            at_S1 = at_T[:, None]
            own = (at_T <= at_S1) & (at_S1 < last_T)
            assert num_above == 0 or self.shape.is_chain
            above = own.new_ones(num_own, num_above)
            visible = torch.cat([above, own], 1)
            if self.window is not None:
                at_keys = torch.arange(num_keys, device=device)
                visible &= at_S1 + num_above - at_keys < self.window
            self.cache[num_above] = visible
        found = self.cache[num_above]
        assert isinstance(found, Tensor)
        return found


@dataclass(frozen=True, slots=True)
class Scoring:
    """How products become scores: ``softcap * tanh(q.k * scale / softcap)``."""

    scale: float
    softcap: float | None = None


class PathKeys(NamedTuple):
    """Keys of the path, for a kernel that takes them together with the block's."""

    k: Tensor
    """[1, K, P, H]"""
    v: Tensor
    start: int
    """Depth of the first."""
    grad_k: Tensor | None
    """Where gradients are added up, in the accumulation dtype, in training."""
    grad_v: Tensor | None


class Term(NamedTuple):
    """One set of keys for the queries of a block."""

    k: Tensor
    """[1, K, T, H]; T is at least 1 (CPU flash divides by zero without keys)."""
    v: Tensor
    mask: Mask
    scoring: Scoring
    path: PathKeys | None = None
    """Keys before those of the block, with kernels that take the path."""


class AttentionKernel(Protocol):
    """q, out, grad_out: [1, N, S, H]; lse: [1, N, S], fp32 or fp64."""

    name: str
    joins_chains: bool
    """Whether a block that is one chain should attend to path and itself at once."""
    takes_path: bool
    """Whether any block attends to path and itself at once, without copies: then a term
    has `Term.path`, the mask has depths and may have a window, and the backward adds
    the path's gradients to their accumulators."""
    needs: str
    """What has to be there, for messages."""

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool: ...

    def forward(self, q: Tensor, term: Term) -> tuple[Tensor, Tensor]:
        """Return out and lse of this term alone; out may be in the accumulation dtype,
        where it is put together from several calls."""
        ...

    def backward(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, term: Term
    ) -> Gradients:
        """Return dq, dk, dv of this term; ``out`` and ``lse`` are of all terms."""
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Average two terms over the same queries, weighted by exp(lse).

    Computed and returned in fp32 (fp64 for fp64): every rounding to half precision in
    between would add an error as large as that of one whole attention.
    """
    acc = accumulation_dtype(out.dtype)
    merged = torch.logaddexp(lse, other_lse)
    weight = torch.exp(lse - merged).unsqueeze(-1)
    other_weight = torch.exp(other_lse - merged).unsqueeze(-1)
    total = out.to(acc) * weight
    total.addcmul_(other_out.to(acc), other_weight)
    return total, merged
