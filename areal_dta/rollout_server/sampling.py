"""Sampling of one token per row of a batch, with its logprob; logprobs of prompts.

The logprob that is returned is log_softmax(logits / temperature) in fp32, over the
whole vocabulary: what the trainer recomputes for the same token (AReaL divides its
logits by the actor's temperature, and knows nothing of top-p or top-k), and what
SGLang returns. Truncation by top-p and top-k and the ban on stopping before
`min_new_tokens` change what is drawn, never what is reported. Greedy rows
(temperature 0) report the logprob at temperature 1.

Shapes: R = rows, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

_LOGPROB_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling options of one row."""

    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """Sampling options of a batch as tensors; rebuilt only when the rows change."""

    temperature_R1: torch.Tensor
    greedy_R: torch.Tensor | None
    top_p_R1: torch.Tensor
    top_k_R1: torch.Tensor
    truncates: bool

    @classmethod
    def build(
        cls, rows: Sequence[RowSampling], vocab_size: int, device: torch.device
    ) -> "BatchSampling":
        greedy = [row.temperature == 0.0 for row in rows]
        top_k = [row.top_k if row.top_k > 0 else vocab_size for row in rows]

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=device)[:, None]

        return cls(
            temperature_R1=column([row.temperature or 1.0 for row in rows]),
            greedy_R=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_p_R1=column([row.top_p for row in rows]),
            top_k_R1=column([min(k, vocab_size) for k in top_k]),
            truncates=any(
                not is_greedy and (row.top_p < 1.0 or k < vocab_size)
                for row, is_greedy, k in zip(rows, greedy, top_k, strict=True)
            ),
        )


def sample(
    logits_RV: torch.Tensor,
    sampling: BatchSampling,
    uniforms: Sequence[float],
    banned: Sequence[tuple[int, Sequence[int]]] = (),
) -> tuple[list[int], list[float]]:
    """Draw one token per row by inverting its cumulative distribution.

    Args:
        uniforms: one number in [0, 1) per row; the only source of randomness.
        banned: (row, token ids that must not be drawn there).

    Returns:
        Token ids and logprobs. A NaN logprob says that nothing could be drawn: the
        logits were not finite, or every token was banned.
    """
    # The logprobs that are reported, and the probabilities that are drawn from.
    logprobs_RV = torch.log_softmax(logits_RV.float() / sampling.temperature_R1, dim=-1)
    probs_RV = logprobs_RV.exp()
    for row, token_ids in banned:
        probs_RV[row, list(token_ids)] = 0.0
    if sampling.truncates:
        probs_RV, ids_RV = _truncate(probs_RV, sampling)
    else:
        ids_RV = None
    # Invert the cumulative distribution.
    # fp64: with a large vocabulary an fp32 sum would round rare tokens away.
    cumulative_RV = probs_RV.cumsum(dim=-1, dtype=torch.float64)
    total_R1 = cumulative_RV[:, -1:]
    threshold_R1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_RV.device)[
        :, None
    ].mul(total_R1)
    # The product may round up to the total itself, behind the last possible token.
    threshold_R1 = torch.minimum(
        threshold_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1))
    )
    index_R1 = torch.searchsorted(cumulative_RV, threshold_R1, right=True)
    index_R1.clamp_(max=probs_RV.shape[-1] - 1)

    # Greedy rows take the best token; a sum of 0 or NaN is reported as NaN.
    if sampling.greedy_R is not None:
        best_R1 = probs_RV.argmax(dim=-1, keepdim=True)
        index_R1 = torch.where(sampling.greedy_R[:, None], best_R1, index_R1)
    token_R1 = index_R1 if ids_RV is None else ids_RV.gather(1, index_R1)
    chosen_R1 = logprobs_RV.gather(1, token_R1)
    chosen_R1 = chosen_R1.masked_fill(~(total_R1 > 0), torch.nan)
    return token_R1[:, 0].tolist(), chosen_R1[:, 0].tolist()


def prompt_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], start: int
) -> list[float]:
    """Return the logprobs of prompt[start + 1:], each given everything before it."""
    tokens = torch.tensor([prompt], device=model.device)
    labels = tokens[0, start + 1 :]
    if not len(labels):
        return []
    logits = model(
        input_ids=tokens, use_cache=False, logits_to_keep=len(labels) + 1
    ).logits[0, :-1]
    # In chunks: fp32 logprobs of a whole prompt would be the largest tensor here.
    logprobs: list[float] = []
    for first in range(0, len(labels), _LOGPROB_CHUNK):
        chunk = slice(first, first + _LOGPROB_CHUNK)
        picked = torch.log_softmax(logits[chunk].float(), dim=-1).gather(
            1, labels[chunk, None]
        )
        logprobs += picked[:, 0].tolist()
    return logprobs


def _truncate(
    probs_RV: torch.Tensor, sampling: BatchSampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero what top-k and top-p cut off; both look at the full distribution.

    Returns the probabilities sorted from high to low, and the token ids behind them.
    """
    sorted_RV, ids_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(sorted_RV.shape[-1], device=sorted_RV.device)
    before_RV = sorted_RV.cumsum(dim=-1) - sorted_RV
    total_R1 = sorted_RV.sum(dim=-1, keepdim=True)
    drop_RV = before_RV > sampling.top_p_R1 * total_R1
    drop_RV &= sampling.top_p_R1 < 1.0  # rounding must not cut a row that keeps all
    drop_RV |= rank_V >= sampling.top_k_R1
    return sorted_RV.masked_fill(drop_RV, 0.0), ids_RV
