"""Oracle: one sequence at a time through the unchanged model, plain autograd.

The truth in tests. `areal_dta.executor.reference` is its name in 0.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_dta.executor.checks.multimodal import text_inputs
from areal_dta.executor.kernels import accumulation_dtype
from areal_dta.tree.leaf_order import IntArray

SequenceLoss = Callable[[int, Tensor, Tensor], Tensor]
"""(index, logprobs [len-1], entropy [len-1]) -> scalar tensor."""


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """Outputs of one sequence; entry t belongs to token t+1, given tokens <= t."""

    logprobs: Tensor
    """[len-1], fp32 (fp64 for an fp64 model)."""
    entropy: Tensor
    """[len-1], entropy of the distribution that token t+1 was drawn from, in nats."""


@dataclass(frozen=True, slots=True)
class ValueOutput:
    """Values of one sequence; entry t belongs to token t, given tokens <= t."""

    values: Tensor
    """[len], fp32 (fp64 for an fp64 model)."""


def value_output(
    model: Any, sequence: Sequence[int] | IntArray | Tensor
) -> ValueOutput:
    """Compute the values of one sequence, differentiable under grad mode."""
    device = next(model.parameters()).device
    tokens = torch.as_tensor(sequence, dtype=torch.int64, device=device)
    values = model(input_ids=tokens[None], use_cache=False).logits[0, :, 0]
    return ValueOutput(values.to(accumulation_dtype(values.dtype)))


def sequence_output(
    model: Any, sequence: Sequence[int] | IntArray | Tensor, temperature: float = 1.0
) -> SequenceOutput:
    """Compute logprobs and entropies of one sequence, differentiable in grad mode."""
    device = next(model.parameters()).device
    tokens = torch.as_tensor(sequence, dtype=torch.int64, device=device)
    inputs = {"input_ids": tokens[None], **text_inputs(model, tokens[None])}
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    logits = logits.to(accumulation_dtype(logits.dtype)) / temperature
    logp = logits.log_softmax(-1)
    logprobs = logp.gather(-1, tokens[1:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return SequenceOutput(logprobs, entropy)


def sequence_outputs(
    model: Any, sequences: Sequence[Any], temperature: float = 1.0
) -> list[SequenceOutput]:
    """Compute the outputs of each sequence on its own, without gradients."""
    with torch.no_grad():
        return [sequence_output(model, s, temperature) for s in sequences]


def forward_backward(
    model: Any,
    sequences: Sequence[Any],
    sequence_loss: SequenceLoss,
    temperature: float = 1.0,
) -> float:
    """Return the sum of the sequences' losses; accumulate gradients."""
    total = 0.0
    for i, sequence in enumerate(sequences):
        output = sequence_output(model, sequence, temperature)
        loss = sequence_loss(i, output.logprobs, output.entropy)
        if loss.requires_grad:
            loss.backward()
        total += float(loss.detach())
    return total
