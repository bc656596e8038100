"""What no partition can do better than: bounds on the slowest rank and on the total.

A rank that holds any part of a conversation computes the whole path above that part.
So the slowest rank needs at least the seconds of the dearest sequence by itself, and a
branch that costs more than a rank may take is repeated down to where it is cut.
"""

# N = sequences, in depth-first order

from __future__ import annotations

import math

import numpy as np

from areal_dta.balance.pricing import Pricing, RangePrices
from areal_dta.tree.leaf_order import IntArray, LeafOrder


def min_makespan(
    pricing: Pricing, order: LeafOrder, prices: RangePrices, num_ranks: int
) -> float:
    """Seconds that the slowest rank of any partition needs at least."""
    if not len(order):
        return 0.0
    alone = prices.before[1:] - prices.before[:-1] + prices.at_cut[:-1]
    share = min_total(pricing, order, prices, num_ranks) / num_ranks
    return max(float(alone.max()), share)


def min_total(
    pricing: Pricing,
    order: LeafOrder,
    prices: RangePrices,
    num_ranks: int,
    limit: float = math.inf,
) -> float:
    """Seconds in all of any partition with no rank empty and none above ``limit``;
    infinite if the limit is less than a sequence by itself.

    That is one tree; what all sequences share once more for each rank after the first;
    and for each branch beyond the limit the shortest path that splitting it repeats.
    """
    n = len(order)
    if not n:
        return 0.0
    common = common_tokens(order)
    num_used = min(num_ranks, n)
    total = prices.price(0, n) + (num_used - 1) * _path(pricing, common)
    if prices.price(0, n) <= limit:
        return total
    cuts = np.flatnonzero(order.lcp_N[1:] <= common) + 1
    bounds = [0, *cuts.tolist(), n]
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        if prices.price(start, end) > limit:
            depth = _cut_depth(order.lcp_N, prices, start, end, limit)
            if depth is None:
                return math.inf
            total += _path(pricing, depth) - _path(pricing, common)
    return total


def _cut_depth(
    lcp_N: IntArray, prices: RangePrices, start: int, end: int, limit: float
) -> int | None:
    """Tokens of the path that is repeated where a branch is split into parts within
    the limit, at least.

    If its parts have no more than ``depth`` tokens in common, then all that shares
    more than that with a sequence is on that sequence's rank, and has to fit.
    """
    deepest = 0
    left = [(start, end, 0)]
    while left:
        first, last, depth = left.pop()
        if prices.price(first, last) <= limit:
            deepest = max(deepest, depth)
        elif last - first == 1:
            return None
        else:
            inner = lcp_N[first + 1 : last]
            depth = int(inner.min())
            forks = (np.flatnonzero(inner == depth) + first + 1).tolist()
            for a, b in zip([first, *forks], [*forks, last], strict=True):
                left.append((a, b, depth))
    return deepest


def common_tokens(order: LeafOrder) -> int:
    """Tokens that all sequences share."""
    return int(order.lcp_N[1:].min(initial=int(order.length_N.min())))


def _path(pricing: Pricing, length: int) -> float:
    """Seconds of a path from the root."""
    return float(pricing.branches(np.array([length]), np.array([0]))[0])
