"""Attention over one set of keys, with its log-sum-exp, forward and backward.

A backend computes a *term* of the block's attention: queries against the path (no
mask) or against the block itself (causal, or masked where the block branches).
Terms are merged in executor/attention.py by their log-sum-exps; ``backward`` gets the
merged output and log-sum-exp, which makes each term's gradients exact (as in ring
attention: Liu et al., arXiv 2310.01889).

Masks are bounded by block x block; a path needs none.
"""

# S = queries, T = keys, N = query heads, K = key/value heads, G = N / K, H = head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Mask:
    """Who sees whom in a term: everybody, bottom-right causal, or as told."""

    causal: bool = False
    visible: Tensor | None = None
    """bool [S, T], True where a query sees a key."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """From products to scores: ``softcap * tanh(q.k * scale / softcap)``."""

    scale: float
    softcap: float | None = None


class AttentionBackend(Protocol):
    """q: [1, N, S, H]; k, v: [1, K, T, H]; out like q; lse: [1, N, S], fp32 or fp64.

    S and T are at least 1 (the CPU flash kernel divides by zero on empty segments).
    """

    name: str

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


class ReferenceBackend:
    """Plain softmax attention in the accumulation dtype. Any device, any dtype."""

    name = "reference"

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
        return True

    def _scores(self, q: Tensor, k: Tensor, mask: Mask, scoring: Scoring) -> Tensor:
        scores_KGST = torch.einsum("kgsh,kth->kgst", q, k) * scoring.scale
        if scoring.softcap is not None:
            scores_KGST = torch.tanh(scores_KGST / scoring.softcap) * scoring.softcap
        visible = _visible(mask, q.shape[-2], k.shape[-2], q.device)
        if visible is not None:
            scores_KGST = scores_KGST.masked_fill(~visible, -torch.inf)
        return scores_KGST

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        acc = accumulation_dtype(q.dtype)
        q_KGSH = _grouped(q.to(acc), k.shape[1])
        scores = self._scores(q_KGSH, k[0].to(acc), mask, scoring)
        lse = scores.logsumexp(-1)
        # a query may see nothing here (a window that ends below the path): weight 0
        weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num_(nan=0.0)
        out = torch.einsum("kgst,kth->kgsh", weights, v[0].to(acc))
        return out.flatten(0, 1)[None].to(q.dtype), lse.flatten(0, 1)[None]

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
        acc = accumulation_dtype(q.dtype)
        num_kv = k.shape[1]
        q_KGSH, do_KGSH = (
            _grouped(q.to(acc), num_kv),
            _grouped(grad_out.to(acc), num_kv),
        )
        scores = self._scores(q_KGSH, k[0].to(acc), mask, scoring)
        lse_KGS = lse[0].unflatten(0, (num_kv, -1))
        weights = torch.exp(scores - lse_KGS.unsqueeze(-1))
        delta = (do_KGSH * _grouped(out.to(acc), num_kv)).sum(-1, keepdim=True)
        grad_weights = torch.einsum("kgsh,kth->kgst", do_KGSH, v[0].to(acc))
        grad_scores = weights * (grad_weights - delta) * scoring.scale
        if scoring.softcap is not None:
            slope = 1 - (scores.nan_to_num(neginf=0.0) / scoring.softcap) ** 2
            grad_scores = grad_scores * slope
        grad_q = torch.einsum("kgst,kth->kgsh", grad_scores, k[0].to(acc))
        grad_k = torch.einsum("kgst,kgsh->kth", grad_scores, q_KGSH)
        grad_v = torch.einsum("kgst,kgsh->kth", weights, do_KGSH)
        return grad_q.flatten(0, 1)[None].to(q.dtype), grad_k[None], grad_v[None]


class FlashCpuBackend:
    """PyTorch's flash attention for CPU. A maskless term folds its query heads."""

    name = "flash_cpu"

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
        same_width = q.shape[-1] == k.shape[-1] == v.shape[-1]
        return q.device.type == "cpu" and same_width and scoring.softcap is None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        num_heads, num_queries = q.shape[1], q.shape[2]
        q, k, v, bias = self._arrange(q, k, v, mask)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask.causal, attn_mask=bias, scale=scoring.scale
        )
        return (
            out.reshape(1, num_heads, num_queries, -1),
            lse.reshape(1, num_heads, num_queries),
        )

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
        shape, num_kv = q.shape, k.shape[1]
        q, k, v, bias = self._arrange(q, k, v, mask)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out.reshape(q.shape),
            q,
            k,
            v,
            out.reshape(q.shape),
            lse.reshape(q.shape[:3]),
            0.0,
            mask.causal,
            attn_mask=bias,
            scale=scoring.scale,
        )
        grad_q, grad_k, grad_v = grads
        if grad_k.shape[1] != num_kv:  # heads were repeated: sum over each group
            acc = accumulation_dtype(grad_k.dtype)
            grad_k = grad_k.unflatten(1, (num_kv, -1)).sum(2, dtype=acc)
            grad_v = grad_v.unflatten(1, (num_kv, -1)).sum(2, dtype=acc)
        return grad_q.reshape(shape), grad_k, grad_v

    def _arrange(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Make the head counts equal: fold q without a mask, else repeat k and v."""
        group = q.shape[1] // k.shape[1]
        if not mask.causal and mask.visible is None:
            q = q.reshape(1, k.shape[1], group * q.shape[2], q.shape[3])
            return q, k, v, None
        if group > 1:
            k = k.repeat_interleave(group, 1)
            v = v.repeat_interleave(group, 1)
        bias = None
        if mask.visible is not None:
            bias = torch.zeros_like(mask.visible, dtype=q.dtype)
            bias = bias.masked_fill_(~mask.visible, -torch.inf)[None, None]
        return q, k, v, bias


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grouped(x_1NSH: Tensor, num_kv: int) -> Tensor:
    return x_1NSH[0].unflatten(0, (num_kv, -1))


def _visible(
    mask: Mask, num_queries: int, num_keys: int, device: torch.device
) -> Tensor | None:
    if mask.visible is not None or not mask.causal:
        return mask.visible
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return ones.tril_(num_keys - num_queries)


BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend for backend in (FlashCpuBackend(), ReferenceBackend())
}


def select_backend(
    name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, path_mask: Mask
) -> AttentionBackend:
    """The backend called ``name``, or for ``auto`` the first that can do the job.

    Sliding windows go to the reference: a query may see nothing of the path, which
    flash kernels do not take.

    Raises:
        ValueError: no backend of that name, or it cannot take these tensors.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(
            f"attention_backend={name!r}; expected auto or one of {sorted(BACKENDS)}"
        )
    reference = BACKENDS[ReferenceBackend.name]
    if path_mask.visible is not None:
        return reference
    if name == "auto":
        candidates = iter(BACKENDS.values())
        return next(b for b in candidates if b.supports(q, k, v, scoring))
    if not BACKENDS[name].supports(q, k, v, scoring):
        raise ValueError(
            f"attention_backend={name!r} cannot take device={q.device.type} with head "
            f"sizes q={q.shape[-1]}, k={k.shape[-1]}, v={v.shape[-1]} and "
            f"softcap={scoring.softcap}; use auto"
        )
    return BACKENDS[name]
