"""Cut sequences in depth-first order into contiguous ranges, one a rank.

The cost of a set of sequences grows with the set, so filling one range after another
up to a limit tells whether the limit can be kept: the smallest one is found by binary
search. Among the cuts that keep it (or a little more), those that repeat the cheapest
paths are found by dynamic programming over the positions that each cut can take.

Cost: O(K log N) a trial, and O(W log W) for the W positions that cuts can take.
"""

# N = sequences, K = ranks

from __future__ import annotations

import numpy as np

from areal_dta.balance.pricing import FloatArray, RangePrices
from areal_dta.tree.leaf_order import IntArray, range_min

_TOLERANCE = 1e-6  # relative, of the smallest limit
DEFAULT_SLACK = 2e-3  # less than predictions are off


def contiguous_cuts(
    prices: RangePrices, num_ranks: int, slack: float = DEFAULT_SLACK
) -> IntArray:
    """Bounds [K + 1] of the ranges; some may be empty.

    Args:
        slack: by how much (relative) the slowest rank may be slower than it has to be,
            for cuts that repeat less.
    """
    n = len(prices)
    if not n:
        return np.zeros(num_ranks + 1, np.int64)
    alone = prices.before[1:] - prices.before[:-1] + prices.at_cut[:-1]
    low = max(float(alone.max()), float(prices.before[-1]) / num_ranks)
    high = prices.price(0, n)
    low = min(low, high)
    if _furthest(prices, low, num_ranks) is not None:
        high = low
    while high > low * (1 + _TOLERANCE):
        limit = (low * high) ** 0.5
        if _furthest(prices, limit, num_ranks) is None:
            low = limit
        else:
            high = limit
    return _cheapest(prices, high * (1 + slack), num_ranks)


def _furthest(prices: RangePrices, limit: float, num_ranks: int) -> IntArray | None:
    """Bounds with every cut as far to the right as it can be; None if impossible."""
    n, before, at_cut = len(prices), prices.before, prices.at_cut
    bounds = np.full(num_ranks + 1, n, np.int64)
    start = 0
    limit *= 1 + 1e-9  # sums are rounded
    for k in range(num_ranks):
        bounds[k] = start
        if start < n:
            reach = before[start] - at_cut[start] + limit
            end = int(before.searchsorted(reach, side="right")) - 1
            if end <= start:
                return None
            start = end
    return bounds if start == n else None


def _nearest(
    prices: RangePrices, first_fit: FloatArray, limit: float, num_ranks: int
) -> IntArray:
    """Bounds with every cut as far to the left as it can be."""
    bounds = np.zeros(num_ranks + 1, np.int64)
    end = len(prices)
    for k in range(num_ranks, 0, -1):
        bounds[k] = end
        end = min(end, int(first_fit.searchsorted(prices.before[end] - limit)))
    return bounds


def _cheapest(prices: RangePrices, limit: float, num_ranks: int) -> IntArray:
    """Bounds of least total cost with every range within ``limit``."""
    last = _furthest(prices, limit, num_ranks)
    assert last is not None
    limit *= 1 + 1e-9
    # range [s, e) is within the limit iff saved[s] >= before[e] - limit
    saved = np.maximum.accumulate(prices.before - prices.at_cut)
    first = np.minimum(_nearest(prices, saved, limit, num_ranks), last)
    repeated = np.zeros(1)  # of each position of the cut before, first[k] .. last[k]
    came_from: list[IntArray] = []
    for k in range(1, num_ranks):
        at = np.arange(first[k], last[k] + 1)
        low = saved.searchsorted(prices.before[at] - limit)
        low = np.clip(low, first[k - 1], np.minimum(at, last[k - 1]))
        high = np.minimum(at, last[k - 1]) + 1
        best, where = _argmin(repeated, low - first[k - 1], high - first[k - 1])
        came_from.append(where + first[k - 1])
        repeated = best + prices.at_cut[at]
    bounds = np.full(num_ranks + 1, len(prices), np.int64)
    bounds[0] = 0
    if num_ranks > 1:
        n = len(prices)
        at = np.arange(first[-2], last[-2] + 1)
        fits = saved[at] >= prices.before[n] - limit
        repeated = np.where(fits, repeated, np.inf)
        bounds[num_ranks - 1] = at[int(repeated.argmin())]
        for k in range(num_ranks - 1, 0, -1):
            came = came_from[k - 1]
            bounds[k - 1] = came[bounds[k] - first[k]] if k > 1 else 0
    return bounds


def _argmin(
    values: FloatArray, start: IntArray, end: IntArray
) -> tuple[FloatArray, IntArray]:
    """Smallest value in each range, and where: the leftmost of equal ones."""
    rank = np.empty(len(values), np.int64)
    by_value = np.argsort(values, kind="stable")
    rank[by_value] = np.arange(len(values))
    where = by_value[range_min(rank, start, end)]
    return values[where], where
