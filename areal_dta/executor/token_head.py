"""Log-probabilities and entropy from logits, fused, with their exact backward.

Positions at a fork have one label a child, so logprobs are per *edge* (position,
label) and entropies per position. Saves the logits and one log-sum-exp a row; a plain
autograd version would hold three more tensors of that size.
"""

# R = logit rows (positions), E = edges (labels), V = vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_dta.executor.backends import accumulation_dtype


class _TokenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, row_E: Tensor, label_E: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        acc = accumulation_dtype(logits_RV.dtype)
        scaled_RV = logits_RV.to(acc) / temperature
        lse_R = scaled_RV.logsumexp(-1)
        logprob_E = scaled_RV[row_E, label_E] - lse_R[row_E]
        probs_RV = torch.exp(scaled_RV - lse_R.unsqueeze(-1))
        # H = lse - sum p z. A logit of -inf has p = 0 and adds nothing.
        entropy_R = lse_R - (probs_RV * scaled_RV).nan_to_num_(nan=0.0).sum(-1)
        ctx.save_for_backward(logits_RV, lse_R, entropy_R, row_E, label_E)
        ctx.temperature = temperature
        return logprob_E, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits_RV, lse_R, entropy_R, row_E, label_E = ctx.saved_tensors
        grad_logprob_E, grad_entropy_R = grads
        scaled_RV = logits_RV.to(lse_R.dtype) / ctx.temperature
        logp_RV = scaled_RV - lse_R.unsqueeze(-1)
        probs_RV = torch.exp(logp_RV)
        # d logprob / d z = onehot - p,  d H / d z = -p (log p + H)
        per_row_R = torch.zeros_like(lse_R).index_add_(0, row_E, grad_logprob_E)
        inner_RV = (logp_RV + entropy_R.unsqueeze(-1)).mul_(grad_entropy_R[:, None])
        inner_RV = inner_RV.nan_to_num_(nan=0.0, neginf=0.0, posinf=0.0)
        grad_RV = -probs_RV * (inner_RV + per_row_R.unsqueeze(-1))
        grad_RV.index_put_((row_E, label_E), grad_logprob_E, accumulate=True)
        return (grad_RV / ctx.temperature).to(logits_RV.dtype), None, None, None


def token_logprobs(
    logits_RV: Tensor, row_E: Tensor, label_E: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each edge [E] and entropy of each row [R].

    fp32 at least, fp64 for fp64 logits; differentiable in the logits.
    """
    return _TokenHead.apply(logits_RV, row_E, label_E, temperature)
