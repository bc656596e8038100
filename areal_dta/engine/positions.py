"""Which positions a loss reads, where that is known.

AReaL's own losses and what it does with forward-only logprobs touch only positions
whose loss mask is set, in agentic RL 0.2-2 % of the tokens. The mask comes in two
alignments: as the rollout made it, mask[t] says that token t is learned; PPO's
``compute_advantages`` and AReaL's SFT roll it by -1, so that mask[t] belongs to output
t, the logprob of token t+1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_dta.engine.batch import RankBatch

# Functions of AReaL that mask everything they read by the (rolled) loss mask.
_MASKING_LOSSES = frozenset({("areal.trainer.ppo.actor", "grpo_loss_fn")})


class Alignment(Enum):
    """What entry t of a loss mask belongs to."""

    TOKEN = "token"
    """Token t, whose logprob is output t-1."""
    OUTPUT = "output"
    """Output t, the logprob of token t+1."""


def reads_loss_positions_only(loss_fn: Callable[..., Any]) -> bool:
    """Whether ``loss_fn`` is one of AReaL's that read masked positions only."""
    inner: Any = loss_fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", "")
    return (getattr(inner, "__module__", ""), name) in _MASKING_LOSSES


def loss_positions(
    batch: RankBatch, row_of: list[int], alignment: Alignment
) -> list[NDArray[np.bool_]] | None:
    """Per sequence a mask [len-1] of the outputs that are read.

    None, for all, where the batch has no loss mask.
    """
    mask = batch.rows.get("loss_mask")
    if mask is None:
        return None if batch.num_rows else []
    mask_BS = mask.bool().numpy()
    shift = 1 if alignment is Alignment.TOKEN else 0
    return [mask_BS[row, shift : batch.lengths[row] - 1 + shift] for row in row_of]
