"""Move branches between ranks until no move or swap makes the slowest rank faster.

Contiguous cuts are not enough where a rank holds few branches: in a long conversation
each call continues the last one, so that nearly all of the cost goes with the last
sequence and cannot be cut in two. What remains is bin packing: give a branch of the
slowest rank to another rank, or swap two branches. A step is scored by

    max(seconds of the two ranks) + weight * (increase of their total seconds)

First a large weight admits only moves that repeat nothing; then smaller ones follow
where that no longer helps. Candidates are the parts of a rank between its shallowest
forks, sorted by a guess of what they gain; the best few are priced exactly. The work is
bounded by a number of pricings, not by time, so that the plan is reproducible.

Invariant (tests/balance/test_partition.py): no move makes the slowest rank slower.
"""

# N = sequences, in depth-first order

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from areal_dta.balance.pricing import Pricing, RangePrices
from areal_dta.tree.leaf_order import IntArray, LeafOrder

WEIGHTS = (1.0, 0.1)
"""Seconds of the slowest rank that one more second in all is worth, in turns."""
_GOOD_ENOUGH = 1.005  # slowest over mean rank: predictions are no better
_ROUNDING = 1e-9  # of the slowest rank: no gain
# Work
_MAX_PRICINGS, _PRICINGS_PER_RANK = 20_000, 60
_GUESSES_PER_PRICING = 500  # which take about as long
_MAX_SEQUENCES = 200_000  # beyond, ranks hold so many that cuts alone are balanced
_MAX_RUNS = 32  # per rank on average: more are scattered on purpose
# Breadth
_MAX_WIDE = 5_000  # sequences; larger batches get a narrower search
_MAX_WIDTH, _MAX_WIDTH_WIDE = 3, 16  # neighbouring branches that move together
_MAX_FORKS = 15  # per rank: the shallowest, one of each of its runs at least
_MAX_TARGETS = 16  # ranks looked at together, the fastest first
_MAX_PRICED = 48  # candidates of these that are priced

_Run = tuple[int, int]
"""Positions [start, end)."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Run that can be moved out of a rank; None for no move back in a swap."""

    run: _Run | None
    removed_seconds: float
    """Seconds saved on the rank when this part leaves it."""
    added_seconds: float
    """Guess of the seconds added to the rank that receives it."""


_NOTHING = _Part(None, 0.0, 0.0)


def local_search(
    pricing: Pricing,
    order: LeafOrder,
    prices: RangePrices,
    rank_N: IntArray,
    num_ranks: int,
    weights: Sequence[float] = WEIGHTS,
) -> tuple[IntArray, int, int]:
    """Improve an assignment.

    Returns:
        A rank per sequence [N] with a smaller makespan, the number of moves, and the
        number of pricings (some microseconds each).
    """
    n = len(order)
    if num_ranks < 2 or n < 2 or n > _MAX_SEQUENCES:
        return rank_N, 0, 0
    if 1 + np.count_nonzero(np.diff(rank_N)) > _MAX_RUNS * num_ranks:
        return rank_N, 0, 0
    ranks = _Ranks(pricing, order, prices, rank_N, num_ranks)
    max_pricings = _MAX_PRICINGS + _PRICINGS_PER_RANK * num_ranks
    num_moves = 0
    for weight in weights:
        while ranks.num_pricings < max_pricings and ranks.improve(weight):
            num_moves += 1
    return ranks.assignment(n), num_moves, ranks.num_pricings


class _Ranks:
    """Current assignment: the runs of each rank, in order, and their seconds."""

    def __init__(
        self,
        pricing: Pricing,
        order: LeafOrder,
        prices: RangePrices,
        rank_N: IntArray,
        num_ranks: int,
    ) -> None:
        self._pricing = pricing
        self._before: list[float] = prices.before.tolist()
        self._length_N, self._lcp_N = order.length_N, order.lcp_N
        self._at_cut_N = prices.at_cut
        self._is_wide = len(order) <= _MAX_WIDE
        self._common = float(pricing.path(order.num_common_tokens))
        self._cuts: dict[_Run, float] = {}
        self.num_pricings = 0
        bounds = np.flatnonzero(np.diff(rank_N)) + 1
        self.runs: list[list[_Run]] = [[] for _ in range(num_ranks)]
        starts = [0, *bounds.tolist()]
        for start, end in zip(starts, [*bounds.tolist(), len(order)], strict=True):
            self.runs[int(rank_N[start])].append((start, end))
        self._parts: dict[int, list[_Part]] = {}
        self.seconds = [self._price(runs) for runs in self.runs]

    def assignment(self, n: int) -> IntArray:
        rank_N = np.empty(n, np.int64)
        for rank, runs in enumerate(self.runs):
            for start, end in runs:
                rank_N[start:end] = rank
        return rank_N

    def improve(self, weight: float) -> bool:
        """Take the best move or swap that speeds up the slowest rank; False if none."""
        seconds = np.array(self.seconds)
        slowest = int(seconds.argmax())
        makespan = self.seconds[slowest]
        if makespan <= _GOOD_ENOUGH * float(seconds.mean()):
            return False
        limit = makespan * (1 - _ROUNDING)
        fastest = np.argsort(seconds, kind="stable")
        fastest = fastest[seconds[fastest] < limit]
        for i in range(0, len(fastest), _MAX_TARGETS):
            best: tuple[float, int, list[_Run], list[_Run]] | None = None
            targets = fastest[i : i + _MAX_TARGETS]
            for target, given, taken in self._candidates(slowest, targets, weight):
                ours = _without(self.runs[slowest], given)
                theirs = _with(self.runs[target], given)
                if taken is not None:
                    ours, theirs = _with(ours, taken), _without(theirs, taken)
                a, b = self._price(ours), self._price(theirs)
                repeated = a + b - makespan - self.seconds[target]
                score = max(a, b) + weight * repeated
                if max(a, b, score) < limit and (best is None or score < best[0]):
                    best = score, target, ours, theirs
            if best is not None:
                _, target, ours, theirs = best
                for rank, runs in ((slowest, ours), (target, theirs)):
                    self.runs[rank], self.seconds[rank] = runs, self._price(runs)
                    self._parts.pop(rank, None)
                return True
        return False

    def _candidates(
        self, slowest: int, targets: IntArray, weight: float
    ) -> Iterator[tuple[int, _Run, _Run | None]]:
        """Yield (other rank, part given to it, part taken in return or None), the most
        promising by guess first."""
        given = self._parts_of(slowest)
        taken: list[tuple[int, _Part]] = []
        for target in targets.tolist():
            taken.append((target, _NOTHING))
            taken += [(target, part) for part in self._parts_of(target)]
        makespan = self.seconds[slowest]
        # Guess every pair of a part given [G, 1] and a part taken [T].
        removed = np.array([p.removed_seconds for p in given])[:, None]
        added = np.array([p.added_seconds for p in given])[:, None]
        their_removed = np.array([p.removed_seconds for _, p in taken])
        their_added = np.array([p.added_seconds for _, p in taken])
        of_target = np.array([self.seconds[target] for target, _ in taken])
        ours = makespan - removed + their_added
        theirs = of_target + added - their_removed
        slower = np.maximum(ours, theirs)
        repeated = ours + theirs - makespan - of_target
        score = (slower + weight * repeated).ravel()
        self.num_pricings += len(score) // _GUESSES_PER_PRICING
        # Keep the best few, in order of their guess.
        promising = np.arange(len(score))
        if len(score) > _MAX_PRICED:
            promising = np.argpartition(score, _MAX_PRICED)[:_MAX_PRICED]
        promising = promising[np.argsort(score[promising], kind="stable")]
        for i, j in zip(*np.divmod(promising, len(taken)), strict=True):
            target, part = taken[int(j)]
            run = given[int(i)].run
            assert run is not None
            yield target, run, part.run

    def _parts_of(self, rank: int) -> list[_Part]:
        """Return neighbouring branches of a rank between its shallowest forks."""
        if rank not in self._parts:
            runs = self.runs[rank]
            parts: list[_Run] = []
            num_forks = max(1, _MAX_FORKS // max(1, len(runs)))
            max_width = _MAX_WIDTH_WIDE if self._is_wide else _MAX_WIDTH
            for start, end in runs:
                inner = self._lcp_N[start + 1 : end]
                forks = np.argsort(inner, kind="stable")[:num_forks] + start + 1
                bounds = [start, *sorted(forks.tolist()), end]
                for width in range(1, min(max_width, len(bounds) - 1) + 1):
                    parts += zip(bounds[:-width], bounds[width:], strict=True)
            self._parts[rank] = [
                _Part(
                    part,
                    self.seconds[rank] - self._price(_without(runs, part)),
                    self._before[part[1]] - self._before[part[0]] + self._path(part[0]),
                )
                for part in parts
            ]
        return self._parts[rank]

    def _path(self, start: int) -> float:
        """Return the seconds of the path above a run, for a rank of other branches."""
        return max(0.0, float(self._at_cut_N[start]) - self._common)

    def _price(self, runs: list[_Run]) -> float:
        """Return the exact seconds of a rank, as ``price_subsets`` does."""
        self.num_pricings += 1 + len(runs) // 4  # long ones take longer
        total, previous = 0.0, 0
        for start, end in runs:
            total += self._before[end] - self._before[start]
            total += self._at_cut(previous, start)
            previous = end
        return total

    def _at_cut(self, previous: int, start: int) -> float:
        """Return the seconds of the path that a run at ``start`` has to repeat, because
        the run before it in its rank ends at ``previous`` already."""
        if not previous:
            return float(self._at_cut_N[start])
        key = previous, start
        if key not in self._cuts:
            own = self._lcp_N[start : start + 1]
            shared = np.minimum(own, self._lcp_N[previous : start + 1].min())
            length = self._length_N[start : start + 1]
            branches = self._pricing.branches
            extra = branches(length, shared) - branches(length, own)
            self._cuts[key] = float(extra[0])
        return self._cuts[key]


def _without(runs: list[_Run], part: _Run) -> list[_Run]:
    result = []
    for start, end in runs:
        if start <= part[0] and part[1] <= end:
            result += [r for r in ((start, part[0]), (part[1], end)) if r[0] < r[1]]
        else:
            result.append((start, end))
    return result


def _with(runs: list[_Run], part: _Run) -> list[_Run]:
    result: list[_Run] = []
    for start, end in sorted([*runs, part]):
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], end
        else:
            result.append((start, end))
    return result
