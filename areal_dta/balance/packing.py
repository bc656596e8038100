"""Pack whole branches into ranks: best-fit decreasing, by exact seconds.

Where ranks hold a few conversations each, contiguous cuts go through most of them, and
every cut repeats a path. Packing leaves branches whole. Only what exceeds a rank's
limit is split, at its shallowest fork, where the repeated path is the shortest. A
branch adds to a rank

    seconds alone - seconds of the longest path that it shares with a branch there

Limits are multiples of ``min_makespan``, which no partition can beat
(tests/balance/test_packing.py compares it with all partitions of small batches).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from areal_dta.balance.pricing import Pricing, RangePrices
from areal_dta.tree.leaf_order import IntArray, LeafOrder, RangeMin

# Limits of a rank over ``min_makespan``, most useful first: tight ones leave misfits,
# loose ones leave ranks empty, and which is best differs.
_ROOM = (1.02, 1.03, 1.04, 1.01)
_MAX_UNITS = 20_000
_MAX_PLACED = 8_000  # units over all limits but the first: about half a second
_MAX_COMPARED = 2_000_000  # pairs of units per limit


def min_makespan(
    pricing: Pricing, order: LeafOrder, prices: RangePrices, num_ranks: int
) -> float:
    """Return a lower bound on the slowest rank's seconds in any partition.

    That is the larger of the most expensive sequence by itself, and a rank's share of

        seconds of one tree + (ranks in use - 1) * seconds of the prefix common to all
    """
    if not len(order):
        return 0.0
    repeated = float(pricing.path(order.num_common_tokens))
    total = prices.price(0, len(order))
    total += (min(num_ranks, len(order)) - 1) * repeated
    return max(float(prices.alone.max()), total / num_ranks)


def packings(
    pricing: Pricing, order: LeafOrder, prices: RangePrices, num_ranks: int
) -> Iterator[IntArray]:
    """Yield ranks of the sequences [N], one assignment per limit.

    Yields none where units are too many: contiguous cuts are balanced there.
    """
    if not len(order):
        return
    bound = min_makespan(pricing, order, prices, num_ranks)
    lcps = RangeMin(order.lcp_N, len(order))
    # Only branches below the same fork share more than all do.
    kind_N = np.cumsum(order.lcp_N <= order.num_common_tokens).astype(np.int64)
    num_placed = 0
    for room in _ROOM:
        units = _units(order, prices, bound * room)
        if not units or num_placed + len(units) > max(_MAX_PLACED, len(units)):
            return
        kind_U = kind_N[[start for start, _, _ in units]]
        if int((np.bincount(kind_U) ** 2).sum()) > _MAX_COMPARED:
            return
        num_placed += len(units)
        yield _pack(pricing, order, lcps, units, kind_U, num_ranks, bound * room)


def _units(
    order: LeafOrder, prices: RangePrices, limit: float
) -> list[tuple[int, int, float]]:
    """Return (start, end, seconds alone) of branches within ``limit``, most expensive
    first; none if there are too many."""
    units: list[tuple[int, int, float]] = []
    left = [(0, len(order))]
    while left:
        if len(units) + len(left) > _MAX_UNITS:
            return []
        start, end = left.pop()
        seconds = prices.price(start, end)
        if seconds <= limit or end - start == 1:
            units.append((start, end, seconds))
            continue
        inner = order.lcp_N[start + 1 : end]
        forks = np.flatnonzero(inner == inner.min()) + start + 1
        bounds = [start, *forks.tolist(), end]
        left += zip(bounds[:-1], bounds[1:], strict=True)
    return sorted(units, key=lambda unit: (-unit[2], unit[0]))


def _pack(
    pricing: Pricing,
    order: LeafOrder,
    lcps: RangeMin,
    units: list[tuple[int, int, float]],
    kind_U: IntArray,
    num_ranks: int,
    limit: float,
) -> IntArray:
    """Place the units in turn, each where it fits and shares the most."""
    common = order.num_common_tokens
    start_U = np.array([start for start, _, _ in units], np.int64)
    end_U = np.array([end for _, end, _ in units], np.int64)
    rank_U = np.zeros(len(units), np.int64)
    placed: dict[int, list[int]] = {}
    rank_N = np.empty(len(order), np.int64)
    load_K = np.zeros(num_ranks)
    for unit, (start, end, seconds) in enumerate(units):
        # What the unit shares with each rank.
        kin = placed.setdefault(int(kind_U[unit]), [])
        shared_K = np.where(load_K > 0, common, 0)
        if kin:
            others = np.array(kin, np.int64)
            is_left = start_U[others] < start
            low = np.where(is_left, end_U[others], end)
            high = np.where(is_left, start, start_U[others]) + 1
            np.maximum.at(shared_K, rank_U[others], lcps(low, high))
        # Best fit among the ranks that share the most; else the least loaded.
        after_K = load_K + seconds - pricing.path(shared_K)
        fits_K = after_K <= limit
        if fits_K.any():
            best_K = fits_K & (shared_K == shared_K[fits_K].max())
            rank = int(np.where(best_K, after_K, -1.0).argmax())
        else:
            rank = int(after_K.argmin())
        load_K[rank], rank_U[unit] = after_K[rank], rank
        rank_N[start:end] = rank
        kin.append(unit)
    return rank_N
