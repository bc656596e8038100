"""Plain softmax attention under a mask: the truth in tests, and the fallback.

Serves what flash kernels do not: sliding windows, soft-capped scores, any device and
dtype. Mask and scores are bounded by block x (path + block).
"""

# S = queries, T = keys, N = query heads, K = key/value heads, G = N / K, H = head dim

from __future__ import annotations

import torch
from torch import Tensor

from areal_dta.executor.kernels.base import Gradients, Scoring, Term, accumulation_dtype


class MaskedSoftmaxKernel:
    """Softmax attention in the accumulation dtype."""

    name = "masked_softmax"
    joins_chains = False

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
        return True

    def forward(self, q: Tensor, term: Term) -> tuple[Tensor, Tensor]:
        acc = accumulation_dtype(q.dtype)
        scores_KGST = self._scores(_grouped(q.to(acc), term), term)
        lse_KGS = scores_KGST.logsumexp(-1)
        # A query may see nothing here (a window that ends below the path): weight 0.
        weights_KGST = torch.exp(scores_KGST - lse_KGS.unsqueeze(-1))
        weights_KGST = weights_KGST.nan_to_num_(nan=0.0)
        out = torch.einsum("kgst,kth->kgsh", weights_KGST, term.v[0].to(acc))
        return out.flatten(0, 1)[None].to(q.dtype), lse_KGS.flatten(0, 1)[None]

    def backward(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, term: Term
    ) -> Gradients:
        acc, scoring = accumulation_dtype(q.dtype), term.scoring
        k_KTH, v_KTH = term.k[0].to(acc), term.v[0].to(acc)
        q_KGSH, do_KGSH, out_KGSH = (
            _grouped(x.to(acc), term) for x in (q, grad_out, out)
        )
        # The weights again, normalised over the keys of all terms.
        scores_KGST = self._scores(q_KGSH, term)
        lse_KGS = lse[0].unflatten(0, (len(k_KTH), -1))
        weights_KGST = torch.exp(scores_KGST - lse_KGS.unsqueeze(-1))
        # Through the softmax, then through the soft cap.
        delta = (do_KGSH * out_KGSH).sum(-1, keepdim=True)
        grad_weights = torch.einsum("kgsh,kth->kgst", do_KGSH, v_KTH)
        grad_scores = weights_KGST * (grad_weights - delta) * scoring.scale
        if scoring.softcap is not None:
            slope = 1 - (scores_KGST.nan_to_num(neginf=0.0) / scoring.softcap) ** 2
            grad_scores = grad_scores * slope
        grad_q = torch.einsum("kgst,kth->kgsh", grad_scores, k_KTH)
        grad_k = torch.einsum("kgst,kgsh->kth", grad_scores, q_KGSH)
        grad_v = torch.einsum("kgst,kgsh->kth", weights_KGST, do_KGSH)
        return grad_q.flatten(0, 1)[None].to(q.dtype), grad_k[None], grad_v[None]

    def _scores(self, q_KGSH: Tensor, term: Term) -> Tensor:
        k_KTH, scoring = term.k[0].to(q_KGSH.dtype), term.scoring
        scores_KGST = torch.einsum("kgsh,kth->kgst", q_KGSH, k_KTH) * scoring.scale
        if scoring.softcap is not None:
            scores_KGST = torch.tanh(scores_KGST / scoring.softcap) * scoring.softcap
        visible_ST = term.mask.visible(term.k.shape[2], q_KGSH.device)
        if visible_ST is not None:
            scores_KGST = scores_KGST.masked_fill(~visible_ST, -torch.inf)
        return scores_KGST


def _grouped(x_1NSH: Tensor, term: Term) -> Tensor:
    """[K, G, S, H]: query heads by the key head that they share."""
    return x_1NSH[0].unflatten(0, (term.k.shape[1], -1))
