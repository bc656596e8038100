"""Attention of a block behind its path, as one autograd function.

Attention over a union of key sets is the average of the attention over each set,
weighted by exp(log-sum-exp). So a block needs two terms and no mask wider than itself:
its queries against the path, and against the block. An attention sink is a third set:
one key a head with a learned score and the value 0.

The backward hands dq, dk, dv of the block to autograd and adds the path's dk, dv
straight into the path accumulators: the path is a leaf here, and the fragment that
owns it takes its gradients backward when all its branches are done.
"""

# S = block tokens, P = path tokens, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_dta.executor.kernels import (
    AttentionBackend,
    Mask,
    Scoring,
    merge,
)
from areal_dta.executor.kv_cache import LayerPath

Term = tuple[Tensor, Tensor, Mask]
"""Keys and values [1, K, T, H], and who sees them."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one layer attends in one block."""

    layer: LayerPath
    path_start: int
    """First path token that any query sees: 0 without a sliding window."""
    path_end: int
    """Tokens of the path; no path term if it equals ``path_start``."""
    block_tokens: int
    block_mask: Mask
    path_mask: Mask
    scoring: Scoring
    backend: AttentionBackend

    def terms(self, k: Tensor, v: Tensor) -> list[Term]:
        """Key sets that cover all a query may see, each key once.

        k, v: [1, K, S, H], of the block. The path must be loaded.
        """
        shape = self.block_mask.shape
        has_path = self.path_start < self.path_end
        if (
            has_path
            and self.backend.joins_chains
            and shape is not None
            and shape.is_chain
            and self.path_mask.matrix is None
        ):
            both = self.layer.extended(self.path_start, self.path_end, k, v)
            return [(*both, self.block_mask)]
        terms = [(k, v, self.block_mask)]
        if has_path:
            path = self.layer.read(self.path_start, self.path_end)
            terms.append((*path, self.path_mask))
        return terms

    def num_above(self, keys: Tensor, mask: Mask) -> int:
        """How many of a term's keys belong to the path: they come first."""
        if mask is self.path_mask:
            return keys.shape[2]
        num_path_tokens = self.path_end - self.path_start
        num_own = self.block_tokens
        assert keys.shape[2] in (num_own, num_path_tokens + num_own)
        return keys.shape[2] - num_own


class _PathAttention(torch.autograd.Function):
    """q: [1, N, S, H]; k, v: [1, K, S, H]; sinks: [N] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_N: Tensor | None,
        plan: AttentionPlan,
    ) -> Tensor:
        out, lse = None, None
        for keys, values, mask in plan.terms(k, v):
            term = plan.backend.forward(q, keys, values, mask, plan.scoring)
            out, lse = term if out is None or lse is None else merge(out, lse, *term)
        assert out is not None and lse is not None
        if sinks_N is not None:
            without = lse
            lse = torch.logaddexp(lse, sinks_N.to(lse.dtype)[None, :, None])
            weight = torch.exp(without - lse).unsqueeze(-1)
            out = (out.to(lse.dtype) * weight).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks_N, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, sinks_N, out, lse = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        grad_out = grads[0]
        grad_q, grad_k, grad_v = None, None, None
        for keys, values, mask in plan.terms(k, v):
            term = plan.backend.backward(
                grad_out, q, keys, values, out, lse, mask, plan.scoring
            )
            grad_q = term[0] if grad_q is None else grad_q + term[0]
            # keys lie as [path, block], or a term has but one of the two
            num_above = plan.num_above(keys, mask)
            if num_above:
                above = (grad[:, :, :num_above] for grad in term[1:])
                plan.layer.add_gradients(plan.path_start, *above)
            if num_above < keys.shape[2]:
                grad_k, grad_v = (grad[:, :, num_above:] for grad in term[1:])
        assert grad_k is not None and grad_v is not None
        grad_sinks_N = None
        if sinks_N is not None:
            weight = torch.exp(sinks_N.to(lse.dtype)[None, :, None] - lse)
            delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            grad_sinks_N = -(weight * delta).sum((0, 2)).to(sinks_N.dtype)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks_N, None


def path_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor | None, plan: AttentionPlan
) -> Tensor:
    """Attention of a block over its path and itself, [1, N, S, H].

    Its backward adds to the gradients of ``plan.layer``.
    """
    out: Tensor = _PathAttention.apply(q, k, v, sinks_N, plan)
    return out
