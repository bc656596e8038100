"""Logprobs and entropy from hidden states, fused with the vocabulary projection.

Here logits are divided by the temperature. Rows are processed in chunks, so that at
most one chunk of logits is held. The softmax is in fp32 (fp64 for fp64), whatever the
compute dtype. The backward is exact: it projects each chunk again, unless there was
only one, which is kept; and it turns the logits into their gradient in place.

A position at a fork has one label per child, so logprobs are per *edge* (row, label)
and entropies per row.

Invariants, and the tests that hold them (tests/executor):
  * logprobs and gradients equal the oracle's for any chunk: test_needed_outputs.py
  * at most a chunk of logits is held: test_needed_outputs.py
  * a frozen projection costs no gradient: test_lora.py
"""

# R = rows (positions), E = edges (labels), D = hidden size, V = vocabulary, C = chunk

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_dta.executor.kernels import accumulation_dtype


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of the rows: one per edge. Edges are sorted by row."""

    row_E: Tensor
    label_E: Tensor
    edges_before_row: tuple[int, ...]
    """[R + 1], on the host: the number of edges before each row, to cut chunks."""

    def of_rows(self, rows: slice) -> tuple[slice, Tensor, Tensor]:
        """Return the edges of some rows: as a slice, their rows (counted from the first
        of ``rows``), their labels."""
        edges = slice(
            self.edges_before_row[rows.start], self.edges_before_row[rows.stop]
        )
        return edges, self.row_E[edges] - rows.start, self.label_E[edges]


CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**27}
"""Logits held at a time, by type of device: 128 MiB in fp32, 256 in bf16. The weight's
gradient is as large as the weight, and each further chunk adds one to it."""
SLAB_ELEMENTS = {"cpu": 2**19, "cuda": 2**25}
"""Logits whose softmax is taken at once, in fp32: on a CPU, where passes over fresh
memory cost more than the arithmetic, what fits in cache."""


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
        ctx.kept = None
        for chunk in _slices(0, num_rows, chunk_rows):
            logits_CV = _project(hidden_RD[chunk], weight_VD, bias_V)
            for rows in _slices(chunk.start, chunk.stop, _slab_rows(logits_CV)):
                slab = logits_CV[rows.start - chunk.start : rows.stop - chunk.start]
                logp_CV = _scaled(slab, temperature)
                lse_R[rows] = logp_CV.logsumexp(-1)
                logp_CV = logp_CV - lse_R[rows].unsqueeze(-1)
                edges, row_E, label_E = labels.of_rows(rows)
                logprob_E[edges] = logp_CV[row_E, label_E]
                # A logit of -inf has p = 0 and adds nothing.
                summands_CV = logp_CV.exp().mul_(logp_CV).nan_to_num_(nan=0.0)
                entropy_R[rows] = -summands_CV.sum(-1)
            if num_rows <= chunk_rows:
                ctx.kept = logits_CV
        ctx.save_for_backward(hidden_RD, weight_VD, bias_V, lse_R, entropy_R)
        ctx.labels, ctx.temperature, ctx.chunk_rows = labels, temperature, chunk_rows
        ctx.set_materialize_grads(False)
        return logprob_E, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden_RD, weight_VD, bias_V, lse_R, entropy_R = ctx.saved_tensors
        grad_logprob_E, grad_entropy_R = grads
        labels: Labels = ctx.labels
        if grad_logprob_E is None:
            grad_logprob_E = lse_R.new_zeros(len(labels.row_E))
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        grad_hidden_RD = torch.empty_like(hidden_RD)
        grad_weight = grad_bias = None
        for chunk in _slices(0, hidden_RD.shape[0], ctx.chunk_rows):
            hidden_CD = hidden_RD[chunk]
            # The chunk's logits: kept from the forward, or projected again.
            logits_CV, ctx.kept = ctx.kept, None
            if logits_CV is None:
                logits_CV = _project(hidden_CD, weight_VD, bias_V)
            # Turn them into their own gradient, in place.
            for rows in _slices(chunk.start, chunk.stop, _slab_rows(logits_CV)):
                slab = logits_CV[rows.start - chunk.start : rows.stop - chunk.start]
                edges, row_E, label_E = labels.of_rows(rows)
                grad_CV = _softmax_gradient(
                    _scaled(slab, ctx.temperature),
                    lse_R[rows],
                    grad_logprob_E[edges],
                    row_E,
                    label_E,
                    None if grad_entropy_R is None else grad_entropy_R[rows],
                    entropy_R[rows],
                )
                slab.copy_(
                    grad_CV / ctx.temperature if ctx.temperature != 1 else grad_CV
                )
            # On to the inputs. Sums over chunks are in fp32: bf16 would lose the small
            # ones.
            grad_hidden_RD[chunk] = logits_CV @ weight_VD
            is_all = hidden_CD.shape == hidden_RD.shape
            if needs_bias:
                grad_bias = _add(grad_bias, logits_CV.sum(0), is_all)
            if needs_weight:
                grad_weight = _add(grad_weight, logits_CV.t() @ hidden_CD, is_all)
        return (
            grad_hidden_RD,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None if grad_bias is None else grad_bias.to(weight_VD.dtype),
            None,
            None,
            None,
        )


def _softmax_gradient(
    logits_CV: Tensor,
    lse_C: Tensor,
    grad_logprob_E: Tensor,
    row_E: Tensor,
    label_E: Tensor,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor,
) -> Tensor:
    """Return the gradient of the scaled logits z.

    d/dz is onehot - p for a logprob, and -p (log p + H) for an entropy H.
    """
    factor_C = torch.zeros_like(lse_C).index_add_(0, row_E, grad_logprob_E)
    logp_CV = logits_CV - lse_C.unsqueeze(-1)
    if grad_entropy_C is None:
        grad_CV = logp_CV.exp_().mul_(-factor_C.unsqueeze(-1))
    else:
        probs_CV = logp_CV.exp()
        inner_CV = logp_CV.add_(entropy_C.unsqueeze(-1))
        inner_CV = inner_CV.mul_(grad_entropy_C.unsqueeze(-1))
        inner_CV = inner_CV.nan_to_num_(nan=0.0, neginf=0.0, posinf=0.0)
        inner_CV = inner_CV.add_(factor_C.unsqueeze(-1))
        grad_CV = probs_CV.mul_(inner_CV).neg_()
    return grad_CV.index_put_((row_E, label_E), grad_logprob_E, accumulate=True)


def _scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    scaled_CV = logits_CV.to(accumulation_dtype(logits_CV.dtype))
    return scaled_CV if temperature == 1.0 else scaled_CV / temperature


def _add(total: Tensor | None, part: Tensor, is_all: bool) -> Tensor:
    """Add a part to a sum in fp32; what is all there is stays as it is."""
    if is_all:
        return part
    # `add_` promotes the part: no copy of it in fp32.
    acc = accumulation_dtype(part.dtype)
    return part.to(acc) if total is None else total.add_(part)


def _slices(start: int, end: int, size: int) -> Iterator[slice]:
    for at in range(start, end, size):
        yield slice(at, min(at + size, end))


def logit_sizes(device_type: str, chunk_elements: int | None) -> tuple[int, int]:
    """Return the numbers of logits that are held at a time, and whose softmax is taken
    at once.

    Args:
        chunk_elements: the first, if it is given.
    """
    kind = "cuda" if device_type == "cuda" else "cpu"
    chunk = CHUNK_ELEMENTS[kind] if chunk_elements is None else chunk_elements
    return chunk, min(chunk, SLAB_ELEMENTS[kind])


def _slab_rows(logits_CV: Tensor) -> int:
    _, slab = logit_sizes(logits_CV.device.type, logits_CV.numel())
    return max(1, slab // logits_CV.shape[1])


def _project(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden_CD, weight_VD, bias_V)


def fused_token_logprobs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels: Labels,
    temperature: float,
    chunk_elements: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each edge [E] and the entropy of each row [R].

    Of ``softmax((hidden @ weight.T + bias) / temperature)``, in fp32 (fp64 for fp64),
    differentiable in hidden, weight and bias. Holds at most ``chunk_elements`` logits
    at a time, or those of one row.
    """
    chunk, _ = logit_sizes(weight_VD.device.type, chunk_elements)
    chunk_rows = max(1, chunk // weight_VD.shape[0])
    return _FusedHead.apply(
        hidden_RD, weight_VD, bias_V, labels, temperature, chunk_rows
    )


def token_logprobs(
    logits_RV: Tensor, labels: Labels, temperature: float
) -> tuple[Tensor, Tensor]:
    """Do the same from logits, for models that do more than project. Plain autograd."""
    acc = accumulation_dtype(logits_RV.dtype)
    logp_RV = (logits_RV.to(acc) / temperature).log_softmax(-1)
    entropy_R = -torch.special.xlogy(logp_RV.exp(), logp_RV.exp()).sum(-1)
    return logp_RV[labels.row_E, labels.label_E], entropy_R
