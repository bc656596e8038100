"""Do the rollout server and the trainer agree on the logprobs of the same weights?

Where they do not (another tokenisation, attention, precision, or stale weights), the
importance ratios are silently wrong. Compared are the tokens that were sampled from the
weights that the trainer has now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from areal_dta.collector.remote_tensors import fetch

_KEYS = ("attention_mask", "logprobs", "versions", "loss_mask", "own")


def logprob_gap(
    batch: Sequence[dict[str, Any]], recomputed: Sequence[Any], version: int
) -> dict[str, float]:
    """Compare what the server reported with what the trainer computes.

    Args:
        batch: one dict per item, with `logprobs`, `versions`, `loss_mask`; all [B, S]
            and aligned with the token that they are about.
        recomputed: the trainer's logprobs per item, [B, S], aligned with the token
            before (AReaL's convention for what an engine returns).
        version: version of the trainer's weights; other tokens are left out.

    Returns:
        ``logprob_gap/num_tokens`` and ``logprob_gap/max``, the largest absolute
        difference (0 if there are no such tokens), for the statistics logger.
    """
    together = [
        {**item, "own": own} for item, own in zip(batch, recomputed, strict=True)
    ]
    num_tokens, largest = 0, 0.0
    for item in fetch(together, _KEYS):
        fresh_BS = (item["versions"] == version) & item["loss_mask"].bool()
        own_BS = torch.roll(item["own"], shifts=1, dims=-1)
        gap = (item["logprobs"] - own_BS)[fresh_BS].abs()
        num_tokens += gap.numel()
        if gap.numel():
            largest = max(largest, float(gap.max()))
    return {
        "logprob_gap/num_tokens": float(num_tokens),
        "logprob_gap/max": largest,
    }
