"""Which outputs are read, by a loss or by who asked for a forward pass.

AReaL's own losses and what it does with forward-only logprobs touch only positions
whose loss mask is set, in agentic RL 0.2-2 % of the tokens. The mask comes in two
alignments: as the rollout made it, mask[t] says that token t is learned; PPO's
``compute_advantages`` and AReaL's SFT roll it by -1, so that mask[t] belongs to output
t, the logprob of token t+1 or the value of having seen token t.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray

from areal_dta.engine.batch import RankBatch


class Alignment(Enum):
    """What entry t of a loss mask belongs to."""

    TOKEN = "token"
    """Token t, which output t-1 is about."""
    OUTPUT = "output"
    """Output t, which is about token t+1."""


@dataclass(frozen=True, slots=True)
class ReadRule:
    """Outputs that are read: those that the loss mask names, the last, or both."""

    mask: Alignment | None
    """None: the loss mask, if there is one, is not what decides."""
    last: bool = False
    """The value at each sequence's last token: a score, or what GAE starts from."""


def read_positions(
    batch: RankBatch, row_of: list[int], rule: ReadRule, of_values: bool
) -> list[NDArray[np.bool_]] | None:
    """Per sequence a mask of the outputs that are read, [len-1]; [len] of values.

    None, for all, where the rule asks for a loss mask and the batch has none.
    """
    num_fewer = 0 if of_values else 1
    assert of_values or not rule.last, "a last token has no logprob"
    if not batch.num_rows:
        return []
    found = [np.zeros(batch.lengths[row] - num_fewer, dtype=bool) for row in row_of]
    if rule.mask is not None:
        mask_BS = batch.rows.get("loss_mask")
        if mask_BS is None:
            return None
        mask_BS = mask_BS.bool()
        if rule.mask is Alignment.TOKEN:
            mask_BS = F.pad(mask_BS[:, 1:], (0, 1))
        array_BS = mask_BS.numpy()
        for row, mask in zip(row_of, found, strict=True):
            mask |= array_BS[row, : len(mask)]
    if rule.last:
        for mask in found:
            mask[-1] = True
    return found
