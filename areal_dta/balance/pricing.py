"""Predicted seconds of a range or a subset of sequences, without building its tree.

A sequence adds to a rank, given its left neighbour there,

    per_token * new tokens + per_pair * new pairs
    + per_output * its needed outputs + per_loss_token * its tokens
    + per_segment * 2 (its branch, and the rest of the one it forks from)
    + the recomputation of new tokens further than retain_tokens above its end

Tree tokens and attended pairs are exact (tests/balance/test_partition.py). Approximated
are blocks, as tokens over ``block_tokens``; recomputation; segments, where several
branches fork at one token; and needed outputs, which are added up over the sequences
(equal sequences need the same ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_dta.balance.cost_model import CostModel
from areal_dta.schedule.block_features import FORWARD, TRAINING
from areal_dta.schedule.schedule import DEFAULT_BLOCK_TOKENS
from areal_dta.tree.leaf_order import IntArray, LeafOrder
from areal_dta.tree.prefix_tree import attended_pairs

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pricing:
    """Prices of counts, in seconds."""

    per_token: float
    """Seconds per tree token, with its share of a block's overhead."""
    per_pair: float
    per_output: float
    per_loss_token: float
    """Seconds per token of a sequence; shared ones count for each sequence."""
    per_recomputed_token: float
    per_recomputed_pair: float
    retain_tokens: int | None
    per_segment: float = 0.0

    @classmethod
    def from_cost_model(
        cls,
        cost: CostModel,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        retain_tokens: int | None = None,
    ) -> Pricing:
        """Derive prices of training with the budgets that the executor will have.

        Raises:
            ValueError: a budget is out of range.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens={block_tokens}; expected at least 1")
        if retain_tokens is not None and retain_tokens < 0:
            raise ValueError(
                f"retain_tokens={retain_tokens}; expected None (retain all) or >= 0"
            )
        c, again = cost.coefficients(TRAINING), cost.coefficients(FORWARD)
        return cls(
            # A block's end is the end of a segment, too.
            per_token=c.per_grad_token + (c.per_block + c.per_segment) / block_tokens,
            per_pair=c.per_pair,
            per_output=c.per_output,
            per_loss_token=c.per_loss_token,
            per_recomputed_token=again.per_no_grad_token
            + again.per_block / block_tokens,
            per_recomputed_pair=again.per_pair,
            # One block's graph is always kept, see ``schedule``.
            retain_tokens=None
            if retain_tokens is None
            else max(retain_tokens, block_tokens),
            per_segment=c.per_segment,
        )

    def branches(self, length_N: IntArray, lcp_N: IntArray) -> FloatArray:
        """Return the seconds of the tokens [lcp, length) of each sequence, without what
        ``sequences`` counts."""
        pairs = attended_pairs(lcp_N, length_N)
        seconds = self.per_token * (length_N - lcp_N) + self.per_pair * pairs
        if self.per_segment:
            seconds += self.per_segment * (length_N > lcp_N) * (1 + (lcp_N > 0))
        if self.retain_tokens is not None:
            kept = np.maximum(lcp_N, length_N - self.retain_tokens)
            seconds += self.per_recomputed_token * (kept - lcp_N)
            seconds += self.per_recomputed_pair * attended_pairs(lcp_N, kept)
        return np.asarray(seconds, np.float64)

    def path(self, num_tokens: IntArray | int) -> FloatArray:
        """Return the seconds of a path from the root, or of several at once."""
        length = np.asarray(num_tokens, np.int64)
        return self.branches(length, np.zeros_like(length))

    def sequences(self, order: LeafOrder, num_outputs_N: IntArray) -> FloatArray:
        """Return the seconds of each sequence that do not depend on its neighbours."""
        return self.per_output * num_outputs_N + self.per_loss_token * order.length_N


class RangePrices:
    """Prices of contiguous ranges in O(1), from prefix sums."""

    def __init__(
        self, pricing: Pricing, order: LeafOrder, num_outputs_N: IntArray
    ) -> None:
        own = pricing.sequences(order, num_outputs_N)
        after_left = pricing.branches(order.length_N, order.lcp_N)
        alone = pricing.branches(order.length_N, np.zeros_like(order.lcp_N))
        self.before = np.concatenate([[0.0], np.cumsum(own + after_left)])
        """Seconds of the first i sequences, [N + 1]."""
        self.at_cut = np.concatenate([alone - after_left, [0.0]])
        """Seconds of the path that is repeated where a range starts, [N + 1]."""
        self.alone = self.before[1:] - self.before[:-1] + self.at_cut[:-1]
        """Seconds of each sequence by itself, [N]."""

    def __len__(self) -> int:
        return len(self.before) - 1

    def price(self, start: int, end: int) -> float:
        """Return the seconds of the sequences at [start, end)."""
        if start >= end:
            return 0.0
        return float(self.before[end] - self.before[start] + self.at_cut[start])


def price_subsets(
    pricing: Pricing,
    order: LeafOrder,
    num_outputs_N: IntArray,
    rank_N: IntArray,
    num_ranks: int,
) -> tuple[FloatArray, IntArray]:
    """Return seconds and tree tokens per rank, [K] each, for any assignment [N]."""
    positions, ranked = order.grouped(rank_N)
    seconds = pricing.branches(ranked.length_N, ranked.lcp_N)
    seconds += pricing.sequences(ranked, num_outputs_N[positions])
    rank, tokens = rank_N[positions], ranked.length_N - ranked.lcp_N
    return (
        np.bincount(rank, seconds, minlength=num_ranks).astype(np.float64),
        np.bincount(rank, tokens, minlength=num_ranks).astype(np.int64),
    )


def outputs_in_order(
    order: LeafOrder, num_outputs: Sequence[int] | IntArray | None
) -> IntArray:
    """Reorder needed outputs from input to depth-first order; by default the lengths.

    Raises:
        ValueError: the number of entries differs, or one is negative.
    """
    if num_outputs is None:
        return order.length_N
    column = np.asarray(num_outputs, np.int64)
    if column.shape != (len(order),) or (column < 0).any():
        raise ValueError(
            f"num_outputs has shape {column.shape}, smallest {column.min(initial=0)}; "
            f"expected ({len(order)},) counts >= 0: needed outputs of each sequence"
        )
    return column[order.sequence_N]
