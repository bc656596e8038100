"""Do the rollout server and the trainer agree on the logprobs of the same weights?

Where they do not (another tokenisation, attention, precision, or stale weights), the
importance ratios are wrong without a word. Compared are the tokens that were sampled
from the weights that the trainer has now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from areal_dta.collector.remote_tensors import fetch

_KEYS = ("attention_mask", "logprobs", "versions", "loss_mask", "own")


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Over the tokens of the trainer's version."""

    num_tokens: int
    largest: float
    """Largest absolute difference; 0 where there are no such tokens."""

    def stats(self) -> dict[str, float]:
        """For the statistics logger."""
        return {
            "logprob_gap/num_tokens": float(self.num_tokens),
            "logprob_gap/max": self.largest,
        }


def logprob_gap(
    batch: Sequence[dict[str, Any]], recomputed: Sequence[Any], version: int
) -> LogprobGap:
    """Compare what the server reported with what the trainer computes.

    Args:
        batch: one dict a prompt, with `logprobs`, `versions`, `loss_mask`; all [B, T]
            and aligned with the token that they are about.
        recomputed: the trainer's for each prompt, [B, T], aligned with the token before
            (AReaL's convention for what an engine returns).
        version: of the trainer's weights.
    """
    together = [
        {**item, "own": own} for item, own in zip(batch, recomputed, strict=True)
    ]
    items = fetch(together, _KEYS)
    num_tokens, largest = 0, 0.0
    for item in items:
        fresh_BT = (item["versions"] == version) & item["loss_mask"].bool()
        own_BT = torch.roll(item["own"], shifts=1, dims=-1)
        gap = (item["logprobs"] - own_BT)[fresh_BT].abs()
        num_tokens += gap.numel()
        if gap.numel():
            largest = max(largest, float(gap.max()))
    return LogprobGap(num_tokens, largest)
