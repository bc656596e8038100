"""Plain softmax attention under a mask: the truth in tests, and the fallback.

Serves what flash kernels do not: sliding windows, soft-capped scores, any device and
dtype. Its mask and scores are bounded by block x (path + block).
"""

# S = queries, T = keys, N = query heads, K = key/value heads, G = N / K, H = head dim

from __future__ import annotations

import torch
from torch import Tensor

from areal_dta.executor.kernels.base import (
    Gradients,
    Mask,
    Scoring,
    accumulation_dtype,
)


class MaskedSoftmaxKernel:
    """Plain softmax attention in the accumulation dtype. Any device, any dtype."""

    name = "masked_softmax"
    joins_chains = False

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
        return True

    def _scores(self, q: Tensor, k: Tensor, mask: Mask, scoring: Scoring) -> Tensor:
        scores_KGST = torch.einsum("kgsh,kth->kgst", q, k) * scoring.scale
        if scoring.softcap is not None:
            scores_KGST = torch.tanh(scores_KGST / scoring.softcap) * scoring.softcap
        visible = mask.visible(k.shape[-2], q.device)
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


def _grouped(x_1NSH: Tensor, num_kv: int) -> Tensor:
    return x_1NSH[0].unflatten(0, (num_kv, -1))
