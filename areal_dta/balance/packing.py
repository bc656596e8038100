"""Pack whole branches into ranks: best-fit decreasing, by exact seconds.

Where ranks hold a few conversations each, contiguous cuts go through most of them, and
every cut repeats a path. Packing leaves branches whole: only what is more than a rank
may take is split, at its shallowest fork, where the path to repeat is the shortest.

What a branch adds to a rank is what it costs alone less the path that it shares with
the rank, the longest that it has in common with a branch there.
"""

# N = sequences, in depth-first order; U = units, which stay together; K = ranks

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from areal_dta.balance.bounds import common_tokens, min_makespan
from areal_dta.balance.pricing import FloatArray, Pricing, RangePrices
from areal_dta.tree.leaf_order import IntArray, LeafOrder

# Of a rank, over the least that the slowest can need: tight limits leave misfits,
# loose ones leave ranks empty. Which is best differs.
_ROOM = (
    *(1.02, 1.03, 1.04, 1.01, 1.0, 1.05, 1.06, 1.07, 1.08, 1.1, 1.12, 1.15),
    *(1.005, 1.015, 1.025, 1.035),
)
_MAX_UNITS = 20_000
_MAX_PLACED = 8_000  # units over all trials, the first one aside: about half a second
_MAX_COMPARED = 2_000_000  # pairs of units of a trial
_ALIKE = 0.9  # of the longest shared path: as good, so what fits best counts


def packings(
    pricing: Pricing, order: LeafOrder, prices: RangePrices, num_ranks: int
) -> Iterator[IntArray]:
    """Ranks of the sequences, [N] each, for several limits; none where units are too
    many, since cuts are balanced there."""
    if not len(order):
        return
    least = min_makespan(pricing, order, prices, num_ranks)
    lcps = SparseTable(order.lcp_N)
    # only branches below the same fork share more than all do
    kind_N = np.cumsum(order.lcp_N <= common_tokens(order)).astype(np.int64)
    num_placed = 0
    for room in _ROOM:
        units = _units(order, prices, least * room)
        if not units or num_placed + len(units) > max(_MAX_PLACED, len(units)):
            return
        kind_U = kind_N[[start for start, _, _ in units]]
        if int((np.bincount(kind_U) ** 2).sum()) > _MAX_COMPARED:
            return
        num_placed += len(units)
        yield _pack(pricing, order, lcps, units, kind_U, num_ranks, least * room)


class SparseTable:
    """Smallest common prefix over ranges of positions: common prefix of two ends."""

    def __init__(self, lcp_N: IntArray) -> None:
        levels = [lcp_N]
        width = 1
        while 2 * width <= len(lcp_N):
            above = levels[-1].copy()
            above[:-width] = np.minimum(above[:-width], above[width:])
            levels.append(above)
            width *= 2
        self._levels = np.stack(levels)

    def __call__(self, start: IntArray, end: IntArray) -> IntArray:
        level = np.frexp((end - start).astype(np.float64))[1] - 1  # floor of log2
        left, right = self._levels[level, start], self._levels[level, end - 2**level]
        least: IntArray = np.minimum(left, right)
        return least


def _units(
    order: LeafOrder, prices: RangePrices, limit: float
) -> list[tuple[int, int, float]]:
    """(start, end, seconds alone) of branches within ``limit``, dearest first; none
    if there are too many."""
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
    lcps: SparseTable,
    units: list[tuple[int, int, float]],
    kind_U: IntArray,
    num_ranks: int,
    limit: float,
) -> IntArray:
    common = common_tokens(order)
    start_U = np.array([start for start, _, _ in units], np.int64)
    end_U = np.array([end for _, end, _ in units], np.int64)
    rank_U = np.zeros(len(units), np.int64)
    placed: dict[int, list[int]] = {}
    rank_N = np.empty(len(order), np.int64)
    load_K = np.zeros(num_ranks)
    for unit, (start, end, seconds) in enumerate(units):
        kin = placed.setdefault(int(kind_U[unit]), [])
        shared_K = np.where(load_K > 0, common, 0)
        if kin:
            others = np.array(kin, np.int64)
            is_left = start_U[others] < start
            low = np.where(is_left, end_U[others], end)
            high = np.where(is_left, start, start_U[others]) + 1
            np.maximum.at(shared_K, rank_U[others], lcps(low, high))
        after_K = load_K + seconds - _paths(pricing, shared_K)
        fits_K = after_K <= limit
        if fits_K.any():
            longest = int(shared_K[fits_K].max())
            best_K = fits_K & (shared_K >= _ALIKE * longest)
            rank = int(np.where(best_K, after_K, -1.0).argmax())
        else:
            rank = int(after_K.argmin())
        load_K[rank], rank_U[unit] = after_K[rank], rank
        rank_N[start:end] = rank
        kin.append(unit)
    return rank_N


def _paths(pricing: Pricing, length: IntArray) -> FloatArray:
    """Seconds of paths from the root."""
    return pricing.branches(length, np.zeros_like(length))
