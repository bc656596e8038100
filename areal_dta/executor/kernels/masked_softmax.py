"""Plain softmax attention under a mask: the truth in tests, and the fallback.

Serves what flash kernels do not: sliding windows, soft-capped scores, any device and
dtype. Scores are held for a slice of the queries at a time, bounded by `MAX_SCORES`.
"""

# S = queries, T = keys, N = query heads, K = key/value heads, G = N / K, H = head dim

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from areal_dta.executor.kernels.base import Gradients, Scoring, Term, accumulation_dtype

MAX_SCORES = 2**26
"""Maximum number of scores held at a time (256 MiB in fp32): queries are taken in
slices, so that a long path costs time and not memory."""


class MaskedSoftmaxKernel:
    """Softmax attention in the accumulation dtype."""

    name = "masked_softmax"
    joins_chains = False
    takes_path = False
    needs = "nothing"

    def supports(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
        return True

    def forward(self, q: Tensor, term: Term) -> tuple[Tensor, Tensor]:
        acc = accumulation_dtype(q.dtype)
        k_KTH, v_KTH = term.k[0].to(acc), term.v[0].to(acc)
        outs, lses = [], []
        for rows in _slices(q, term):
            scores_KGST = _scores(
                _grouped(q[:, :, rows].to(acc), term), k_KTH, term, rows
            )
            lse_KGS = scores_KGST.logsumexp(-1)
            # A query may see nothing here (a window that ends below the path).
            weights_KGST = torch.exp(scores_KGST - lse_KGS.unsqueeze(-1))
            weights_KGST = weights_KGST.nan_to_num_(nan=0.0)
            out = torch.einsum("kgst,kth->kgsh", weights_KGST, v_KTH)
            outs.append(out.flatten(0, 1)[None].to(q.dtype))
            lses.append(lse_KGS.flatten(0, 1)[None])
        return _joined(outs), _joined(lses)

    def backward(
        self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, term: Term
    ) -> Gradients:
        acc = accumulation_dtype(q.dtype)
        k_KTH, v_KTH = term.k[0].to(acc), term.v[0].to(acc)
        grad_qs: list[Tensor] = []
        grad_k: Tensor | None = None
        grad_v: Tensor | None = None
        for rows in _slices(q, term):
            q_KGSH, do_KGSH, out_KGSH = (
                _grouped(x[:, :, rows].to(acc), term) for x in (q, grad_out, out)
            )
            # The weights again, normalised over the keys of all terms.
            scores_KGST = _scores(q_KGSH, k_KTH, term, rows)
            lse_KGS = lse[0, :, rows].unflatten(0, (len(k_KTH), -1))
            weights_KGST = torch.exp(scores_KGST - lse_KGS.unsqueeze(-1))
            part_v = torch.einsum("kgst,kgsh->kth", weights_KGST, do_KGSH)
            # Through the softmax, then through the soft cap.
            delta = (do_KGSH * out_KGSH).sum(-1, keepdim=True)
            grad_weights = torch.einsum("kgsh,kth->kgst", do_KGSH, v_KTH)
            grad_scores = weights_KGST * (grad_weights - delta) * term.scoring.scale
            if term.scoring.softcap is not None:
                capped = scores_KGST.nan_to_num(neginf=0.0) / term.scoring.softcap
                grad_scores = grad_scores * (1 - capped**2)
            grad_q = torch.einsum("kgst,kth->kgsh", grad_scores, k_KTH)
            grad_qs.append(grad_q.flatten(0, 1)[None].to(q.dtype))
            part_k = torch.einsum("kgst,kgsh->kth", grad_scores, q_KGSH)
            grad_k = part_k if grad_k is None else grad_k.add_(part_k)
            grad_v = part_v if grad_v is None else grad_v.add_(part_v)
        assert grad_k is not None and grad_v is not None
        return _joined(grad_qs), grad_k[None], grad_v[None]


def _scores(q_KGSH: Tensor, k_KTH: Tensor, term: Term, rows: slice) -> Tensor:
    """Return the scores of some rows, -inf where a query does not see a key."""
    scoring = term.scoring
    scores_KGST = torch.einsum("kgsh,kth->kgst", q_KGSH, k_KTH) * scoring.scale
    if scoring.softcap is not None:
        scores_KGST = torch.tanh(scores_KGST / scoring.softcap) * scoring.softcap
    visible_ST = term.mask.visible(term.k.shape[2], q_KGSH.device)
    if visible_ST is not None:
        scores_KGST = scores_KGST.masked_fill(~visible_ST[rows], -torch.inf)
    return scores_KGST


def _slices(q: Tensor, term: Term) -> Iterator[slice]:
    _, num_heads, num_queries, _ = q.shape
    size = max(1, MAX_SCORES // (num_heads * term.k.shape[2]))
    for start in range(0, num_queries, size):
        yield slice(start, min(start + size, num_queries))


def _joined(parts: list[Tensor]) -> Tensor:
    """[1, N, S, ...] from slices of the queries."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _grouped(x_1NSH: Tensor, term: Term) -> Tensor:
    """[K, G, S, H]: query heads by the key head that they share."""
    return x_1NSH[0].unflatten(0, (term.k.shape[1], -1))
