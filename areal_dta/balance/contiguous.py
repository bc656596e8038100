"""Cut sequences in depth-first order into contiguous ranges, one per rank.

The cost of a range grows with the range. So filling one range after another up to a
limit tells whether the limit can be kept, and the smallest such limit is found by
bisection. Among the cuts that keep it (within ``slack``), dynamic programming over the
positions that each cut can take finds those that repeat the cheapest paths. Both are
compared with brute force (tests/balance/test_partition.py).

Cost: O(K log N) per trial, and O(W log W) for the W positions that cuts can take.
"""

# N = sequences, K = ranks

from __future__ import annotations

import numpy as np

from areal_dta.balance.pricing import FloatArray, RangePrices
from areal_dta.tree.leaf_order import IntArray, range_min

_TOLERANCE = 1e-6  # relative, of the smallest limit
_ROUNDING = 1 + 1e-9  # of sums
DEFAULT_SLACK = 2e-3  # below the error of predictions


def contiguous_cuts(
    prices: RangePrices, num_ranks: int, slack: float = DEFAULT_SLACK
) -> IntArray:
    """Return the bounds [K + 1] of the ranges; some may be empty.

    Args:
        slack: by how much (relative) the slowest rank may exceed its minimum, for cuts
            that repeat less.
    """
    n = len(prices)
    if not n:
        return np.zeros(num_ranks + 1, np.int64)
    # Bisect geometrically between a share, or a sequence alone, and everything.
    low = max(float(prices.alone.max()), float(prices.before[-1]) / num_ranks)
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
    """Return bounds with every cut as far right as possible; None if there are none."""
    n, before, at_cut = len(prices), prices.before, prices.at_cut
    bounds = np.full(num_ranks + 1, n, np.int64)
    start = 0
    limit *= _ROUNDING
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
    prices: RangePrices, saved: FloatArray, limit: float, num_ranks: int
) -> IntArray:
    """Return bounds with every cut as far left as possible."""
    bounds = np.zeros(num_ranks + 1, np.int64)
    end = len(prices)
    for k in range(num_ranks, 0, -1):
        bounds[k] = end
        end = min(end, int(saved.searchsorted(prices.before[end] - limit)))
    return bounds


def _cheapest(prices: RangePrices, limit: float, num_ranks: int) -> IntArray:
    """Return the bounds of minimum total cost with every range within ``limit``."""
    last = _furthest(prices, limit, num_ranks)
    assert last is not None
    limit *= _ROUNDING
    # Range [s, e) is within the limit iff saved[s] >= before[e] - limit.
    saved = np.maximum.accumulate(prices.before - prices.at_cut)
    # Each cut k lies in first[k] .. last[k].
    first = np.minimum(_nearest(prices, saved, limit, num_ranks), last)
    # Forward: the minimum repeated seconds for each position of cut k.
    repeated = np.zeros(1)
    came_from: list[IntArray] = []
    for k in range(1, num_ranks):
        at = np.arange(first[k], last[k] + 1)
        low = saved.searchsorted(prices.before[at] - limit)
        low = np.clip(low, first[k - 1], np.minimum(at, last[k - 1]))
        high = np.minimum(at, last[k - 1]) + 1
        best, where = _argmin(repeated, low - first[k - 1], high - first[k - 1])
        came_from.append(where + first[k - 1])
        repeated = best + prices.at_cut[at]
    # Backward: the last cut has to leave a range that fits; then follow the choices.
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
    """Return the minimum of each range, and where: the leftmost of equal values."""
    rank = np.empty(len(values), np.int64)
    by_value = np.argsort(values, kind="stable")
    rank[by_value] = np.arange(len(values))
    where = by_value[range_min(rank, start, end)]
    return values[where], where
