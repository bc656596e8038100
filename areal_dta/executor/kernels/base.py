"""What an attention backend does: one term of a block's attention.

A term is the block's queries against one set of keys, with its log-sum-exp: the path,
the block itself, or for a chain both at once. Terms are merged by their log-sum-exps
in executor/path_attention.py; ``backward`` gets the merged output and log-sum-exp,
which makes each term's gradients exact (as in ring attention: Liu et al., arXiv
2310.01889).

Masks are bounded by block x (path + block); most terms need none.
"""

# S = queries, T = keys, N = query heads, K = key/value heads, G = N / K, H = head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from areal_dta.executor.block_layout import BlockShape

Gradients = tuple[Tensor, Tensor, Tensor]


class Mask:
    """Who sees whom in a term: everybody, as a block's shape says, or as told.

    A backend may leave in ``cache`` what it derives from the mask: all layers of a
    block share one, and its backward finds it again.

    Args:
        shape: the keys are the block's own; or its last ones are, and all queries
            see the others. The latter for chains only.
        visible: bool [S, T], True where a query sees a key.
    """

    def __init__(
        self, shape: BlockShape | None = None, visible: Tensor | None = None
    ) -> None:
        assert shape is None or visible is None
        self.shape, self.matrix = shape, visible
        self.cache: dict[object, object] = {}

    def visible(self, num_keys: int, device: torch.device) -> Tensor | None:
        """The whole matrix; None if everybody sees everything."""
        if self.shape is None:
            return self.matrix
        num_above = num_keys - self.shape.num_tokens
        if num_above not in self.cache:
            own = torch.from_numpy(self.shape.visible).to(device)
            assert num_above == 0 or self.shape.is_chain
            above = own.new_ones(len(own), num_above)
            self.cache[num_above] = torch.cat([above, own], 1)
        found = self.cache[num_above]
        assert isinstance(found, Tensor)
        return found


@dataclass(frozen=True, slots=True)
class Scoring:
    """From products to scores: ``softcap * tanh(q.k * scale / softcap)``."""

    scale: float
    softcap: float | None = None


class AttentionKernel(Protocol):
    """q: [1, N, S, H]; k, v: [1, K, T, H]; out like q; lse: [1, N, S], fp32 or fp64.

    S and T are at least 1 (the CPU flash kernel divides by zero on empty segments).
    """

    name: str
    joins_chains: bool
    """Whether a block that is one chain should attend to path and itself at once."""

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool: ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring
    ) -> tuple[Tensor, Tensor]: ...

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
    ) -> Gradients: ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Average two terms over the same queries, weighted by exp(lse), in fp32: flash
    rounds each to the compute dtype."""
    acc = accumulation_dtype(out.dtype)
    merged = torch.logaddexp(lse, other_lse)
    weight = torch.exp(lse - merged).unsqueeze(-1)
    other_weight = torch.exp(other_lse - merged).unsqueeze(-1)
    total = out.to(acc) * weight
    total.addcmul_(other_out.to(acc), other_weight)
    return total.to(out.dtype), merged
