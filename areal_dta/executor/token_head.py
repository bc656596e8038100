"""Log-probabilities and entropy from hidden states, fused with the vocabulary
projection, a chunk of rows at a time, with their exact backward.

Positions at a fork have one label a child, so logprobs are per *edge* (row, label) and
entropies per row. Never more than a chunk of logits is held; the softmax is in fp32
(fp64 for fp64), whatever the compute dtype. The backward projects a chunk again unless
the one chunk there was has been kept.
"""

# R = rows (positions), E = edges (labels), D = hidden size, V = vocabulary, C = chunk

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_dta.executor.backends import accumulation_dtype


@dataclass(frozen=True, slots=True)
class Labels:
    """What to read from the rows. Edges are sorted by row."""

    row_E: Tensor
    label_E: Tensor
    edges_before_row: tuple[int, ...]
    """[R + 1]: edges of rows before each row, on the host, to cut chunks."""


class _Chunk:
    """The softmax of some rows."""

    def __init__(self, logits_CV: Tensor, temperature: float, lse_C: Tensor | None):
        acc = accumulation_dtype(logits_CV.dtype)
        scaled_CV = logits_CV.to(acc)
        if temperature != 1.0:
            scaled_CV = scaled_CV / temperature
        self.lse_C = scaled_CV.logsumexp(-1) if lse_C is None else lse_C
        self.logp_CV = scaled_CV - self.lse_C.unsqueeze(-1)
        self.probs_CV = self.logp_CV.exp()

    def entropy(self) -> Tensor:
        # A logit of -inf has p = 0 and adds nothing.
        return -(self.probs_CV * self.logp_CV).nan_to_num_(nan=0.0).sum(-1)

    def gradient(
        self,
        grad_logprob_E: Tensor,
        row_E: Tensor,
        label_E: Tensor,
        grad_entropy_C: Tensor | None,
        entropy_C: Tensor,
    ) -> Tensor:
        """d/dz: onehot - p for a logprob, -p (log p + H) for an entropy. Destroys."""
        factor_C = torch.zeros_like(self.lse_C).index_add_(0, row_E, grad_logprob_E)
        if grad_entropy_C is None:
            grad_CV = self.probs_CV.mul_(-factor_C.unsqueeze(-1))
        else:
            inner_CV = self.logp_CV.add_(entropy_C.unsqueeze(-1))
            inner_CV = inner_CV.mul_(grad_entropy_C.unsqueeze(-1))
            inner_CV = inner_CV.nan_to_num_(nan=0.0, neginf=0.0, posinf=0.0)
            inner_CV = inner_CV.add_(factor_C.unsqueeze(-1))
            grad_CV = self.probs_CV.mul_(inner_CV).neg_()
        return grad_CV.index_put_((row_E, label_E), grad_logprob_E, accumulate=True)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels: Labels,
        temperature: float,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_edges = hidden_RD.shape[0], len(labels.row_E)
        acc = accumulation_dtype(hidden_RD.dtype)
        logprob_E = hidden_RD.new_empty(num_edges, dtype=acc)
        entropy_R = hidden_RD.new_empty(num_rows, dtype=acc)
        lse_R = torch.empty_like(entropy_R)
        kept = None
        for start in range(0, num_rows, chunk_rows):
            end = min(start + chunk_rows, num_rows)
            edges = slice(labels.edges_before_row[start], labels.edges_before_row[end])
            logits_CV = _project(hidden_RD[start:end], weight_VD, bias_V)
            chunk = _Chunk(logits_CV, temperature, None)
            row_E, label_E = labels.row_E[edges] - start, labels.label_E[edges]
            logprob_E[edges] = chunk.logp_CV[row_E, label_E]
            entropy_R[start:end] = chunk.entropy()
            lse_R[start:end] = chunk.lse_C
            kept = logits_CV if num_rows <= chunk_rows else None
        ctx.save_for_backward(hidden_RD, weight_VD, bias_V, lse_R, entropy_R, kept)
        ctx.labels, ctx.temperature, ctx.chunk_rows = labels, temperature, chunk_rows
        ctx.set_materialize_grads(False)
        return logprob_E, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden_RD, weight_VD, bias_V, lse_R, entropy_R, kept = ctx.saved_tensors
        grad_logprob_E, grad_entropy_R = grads
        labels, chunk_rows = ctx.labels, ctx.chunk_rows
        if grad_logprob_E is None:
            grad_logprob_E = lse_R.new_zeros(len(labels.row_E))
        num_rows = hidden_RD.shape[0]
        acc = accumulation_dtype(hidden_RD.dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        grad_hidden_RD = torch.empty_like(hidden_RD)
        # Sums over chunks in fp32: bf16 would lose the small ones.
        grad_weight = torch.zeros_like(weight_VD, dtype=acc) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=acc) if needs_bias else None
        for start in range(0, num_rows, chunk_rows):
            end = min(start + chunk_rows, num_rows)
            edges = slice(labels.edges_before_row[start], labels.edges_before_row[end])
            hidden_CD = hidden_RD[start:end]
            logits_CV = (
                kept if kept is not None else _project(hidden_CD, weight_VD, bias_V)
            )
            grad_CV = _Chunk(logits_CV, ctx.temperature, lse_R[start:end]).gradient(
                grad_logprob_E[edges],
                labels.row_E[edges] - start,
                labels.label_E[edges],
                None if grad_entropy_R is None else grad_entropy_R[start:end],
                entropy_R[start:end],
            )
            if ctx.temperature != 1.0:
                grad_CV = grad_CV.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0)
            grad_CV = grad_CV.to(hidden_RD.dtype)
            grad_hidden_RD[start:end] = grad_CV @ weight_VD
            if grad_weight is not None:
                grad_weight += grad_CV.t() @ hidden_CD
        return (
            grad_hidden_RD,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None if grad_bias is None else grad_bias.to(weight_VD.dtype),
            None,
            None,
            None,
        )


def _project(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden_CD, weight_VD, bias_V)


def fused_token_logprobs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels: Labels,
    temperature: float,
    chunk_elements: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each edge [E] and entropy of each row [R] under
    ``softmax((hidden @ weight.T + bias) / temperature)``.

    fp32 at least, fp64 for fp64; differentiable in hidden, weight and bias. Holds at
    most ``chunk_elements`` logits at a time (or those of one row).
    """
    chunk_rows = max(1, chunk_elements // weight_VD.shape[0])
    return _FusedHead.apply(
        hidden_RD, weight_VD, bias_V, labels, temperature, chunk_rows
    )


def token_logprobs(
    logits_RV: Tensor, labels: Labels, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same from logits, for models that do more than project (plain autograd)."""
    acc = accumulation_dtype(logits_RV.dtype)
    logp_RV = (logits_RV.to(acc) / temperature).log_softmax(-1)
    entropy_R = -torch.special.xlogy(logp_RV.exp(), logp_RV.exp()).sum(-1)
    return logp_RV[labels.row_E, labels.label_E], entropy_R
