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

from areal_dta.executor.backends import (
    AttentionBackend,
    Mask,
    Scoring,
    accumulation_dtype,
)
from areal_dta.executor.path_cache import LayerPath


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one layer attends in one block."""

    layer: LayerPath
    path_start: int
    """First path token that any query sees: 0 without a sliding window."""
    path_end: int
    """Tokens of the path; no path term if it equals ``path_start``."""
    block_mask: Mask
    path_mask: Mask
    scoring: Scoring
    backend: AttentionBackend


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
        backend, scoring = plan.backend, plan.scoring
        out, lse = backend.forward(q, k, v, plan.block_mask, scoring)
        if plan.path_start < plan.path_end:
            path_k, path_v = plan.layer.read(plan.path_start, plan.path_end)
            term = backend.forward(q, path_k, path_v, plan.path_mask, scoring)
            out, lse = _merge(out, lse, *term)
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
        backend, scoring = plan.backend, plan.scoring
        grad_out = grads[0].contiguous()
        grad_q, grad_k, grad_v = backend.backward(
            grad_out, q, k, v, out, lse, plan.block_mask, scoring
        )
        if plan.path_start < plan.path_end:
            path_k, path_v = plan.layer.read(plan.path_start, plan.path_end)
            path_grad_q, path_grad_k, path_grad_v = backend.backward(
                grad_out, q, path_k, path_v, out, lse, plan.path_mask, scoring
            )
            plan.layer.add_gradients(plan.path_start, path_grad_k, path_grad_v)
            grad_q = grad_q + path_grad_q
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


def _merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Average two partial outputs in fp32: flash rounds each to the compute dtype."""
    acc = accumulation_dtype(a.dtype)
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).unsqueeze(-1)
    weight_b = torch.exp(lse_b - lse).unsqueeze(-1)
    return (a.to(acc) * weight_a + b.to(acc) * weight_b).to(a.dtype), lse
