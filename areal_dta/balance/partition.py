"""Who trains what: sequences to data-parallel ranks, all equally busy.

Three candidates are made: contiguous cuts of the depth-first order, first-fit by tree
tokens, and balancing by sequence tokens. They are priced as a whole (see ``pricing``
for what is exact). These, looser cuts, and whole branches packed by seconds (see
``packing``) are improved by moving branches between ranks (``local_search``). The plan
with the minimum makespan is used; among those within 0.5 % of it, one that keeps both
limits if there is one, and among these the one with the smallest total.

The limits: the slowest rank takes no more than 1.05 times the mean, and all together no
more than 1.02 times t, the total of the cheapest of the three. Both are kept on
tau2-shaped batches with 30 sequences a rank, unless episodes are too large for it: no
rank may then take more than 1.05 * 1.02 * t / num_ranks, and ``bounds.min_total``
tells what any such partition costs. For 512 sequences of recorded airline episodes
(tests/plan/test_balance.py) both are kept on 10 ranks; on 12, two episodes have to be
split, which alone makes 1.047 t (1.052 t is reached, at 1.006 times the mean); on 16,
one sequence by itself takes 1.25 t / 16. The slowest rank comes first there. It also
does where a rank's share is about one episode: of generated shapes with 4 to 20 calls
an episode all are balanced, but some of those with 20 cost up to 1.07 t, and the bound
does not tell whether they have to.

Invariants (tests/plan/test_partition.py):
  * every sequence is given to exactly one rank; any number of either, also none;
  * the plan depends on the sequences, not on the order in which they arrived;
  * a rank's sequences are in depth-first order.
"""

# N = sequences, in depth-first order

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from areal_dta.balance.contiguous import contiguous_cuts
from areal_dta.balance.first_fit import by_tokens, by_tree_tokens
from areal_dta.balance.local_search import WEIGHTS, local_search
from areal_dta.balance.packing import packings
from areal_dta.balance.pricing import (
    FloatArray,
    Pricing,
    RangePrices,
    outputs_in_order,
    price_subsets,
)
from areal_dta.tree.leaf_order import IntArray, LeafOrder

CONTIGUOUS, TREE_TOKENS, TOKENS = "contiguous", "tree_tokens", "tokens"
_TIE = 5e-3  # relative, of the makespan: predictions are no better
# Cuts that repeat less and are balanced by moves afterwards are often the better start.
_SLACKS = (2e-2, 5e-2)
MAX_IMBALANCE, MAX_TOTAL = 1.05, 1.02  # the limits
_MAX_PRICINGS = 50_000  # in all, of a small batch: about half a second
_MAX_PACKED = 12  # of the packings, those that are improved
_FEW_SEQUENCES = 5_000  # beyond, the first start is balanced as it is
_WEIGHTS_OF_MANY = (0.4,)  # see local_search
_EVEN = 1.02  # slowest over mean: no need to pack many
_HOPELESS = 1.5  # times the best makespan: no moves will make up for that


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition that was considered, as its method makes it."""

    method: str
    makespan_seconds: float
    total_seconds: float
    num_tree_tokens: int
    """Over all ranks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sequences of each rank, and what they are predicted to cost."""

    assignments: tuple[tuple[int, ...], ...]
    """Per rank the numbers of its sequences, in depth-first order; may be empty."""
    predicted_seconds: tuple[float, ...]
    """Per rank."""
    method: str
    """The one of METHODS that the plan started from (a packing: tree tokens)."""
    num_moves: int
    """Branches then moved or swapped between ranks."""
    num_sequence_tokens: int
    num_tree_tokens: int
    """Of all ranks' trees together."""
    num_repeated_tokens: int
    """Of these, those that a single tree would not hold."""
    candidates: tuple[Candidate, ...]
    planning_seconds: float = field(compare=False)

    @property
    def num_ranks(self) -> int:
        return len(self.assignments)

    @property
    def makespan_seconds(self) -> float:
        return max(self.predicted_seconds, default=0.0)

    @property
    def imbalance(self) -> float:
        """Slowest rank over the mean, >= 1; 1.0 where there is nothing to do."""
        total = sum(self.predicted_seconds)
        return self.makespan_seconds * self.num_ranks / total if total else 1.0

    def rank_of(self) -> dict[int, int]:
        """Sequence -> rank."""
        return {s: r for r, ss in enumerate(self.assignments) for s in ss}


def partition(
    order: LeafOrder,
    num_ranks: int,
    pricing: Pricing,
    num_outputs: Sequence[int] | IntArray | None = None,
    groups: Sequence[int] | IntArray | None = None,
    methods: Sequence[str] | None = None,
    moves: bool = True,
) -> Plan:
    """Plan a batch.

    Args:
        order: ``LeafOrder.from_tree(tree)``, or made without a tree.
        num_outputs: by sequence number, needed outputs of it; by
            default as many as it has tokens.
        groups: by sequence number, its prompt, as any integers; what the two methods
            of the field keep together. By default the trees below what all share.
        methods: candidates to consider, by default all of METHODS.
        moves: whether they are improved by ``local_search``.

    Raises:
        ValueError: no rank, an unknown method, or arguments that do not fit.
    """
    start = time.perf_counter()
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}; expected at least 1")
    methods = METHODS if methods is None else methods
    if not methods or set(methods) - set(METHODS):
        raise ValueError(f"methods={list(methods)}; expected some of {list(METHODS)}")
    num_outputs_N = outputs_in_order(order, num_outputs)
    group_N = groups_in_order(order, groups)
    prices = RangePrices(pricing, order, num_outputs_N)
    starts = [
        (method, _MAKE[method](order, group_N, prices, num_ranks))
        for method in METHODS
        if method in methods
    ]

    def priced(method: str, rank_N: IntArray, num_moves: int) -> _Priced:
        seconds, tokens = price_subsets(
            pricing, order, num_outputs_N, rank_N, num_ranks
        )
        return _Priced(method, rank_N, num_moves, seconds, int(tokens.sum()))

    plain = [priced(method, rank_N, 0) for method, rank_N in starts]
    considered = list(plain)
    least = min(p.makespan for p in plain)
    min_total = min(p.total for p in plain)
    is_small = len(order) <= _FEW_SEQUENCES
    weights = WEIGHTS if is_small else _WEIGHTS_OF_MANY
    left = _MAX_PRICINGS

    def packed() -> list[_Priced]:
        """The fastest first."""
        made: list[_Priced] = []
        for rank_N in packings(pricing, order, prices, num_ranks):
            made.append(priced(TREE_TOKENS, rank_N, 0))
            if made[-1].is_good(min_total):
                break
        considered.extend(made)
        return sorted(made, key=lambda p: p.makespan)

    def improve(starts: Iterable[tuple[str, IntArray]]) -> None:
        nonlocal left
        for method, rank_N in starts:
            if left <= 0 or considered[-1].is_good(min_total):
                return
            moved_N, num_moves, num_pricings = local_search(
                pricing, order, prices, rank_N, num_ranks, weights
            )
            considered.append(priced(method, moved_N, num_moves))
            left -= num_pricings

    if moves and is_small:
        for slack in _SLACKS if CONTIGUOUS in methods else ():
            bounds = contiguous_cuts(prices, num_ranks, slack)
            starts.append((CONTIGUOUS, _ranks_of(bounds)))
        hopeless = {p.method for p in plain if p.makespan > _HOPELESS * least}
        starts = [(method, r) for method, r in starts if method not in hopeless]
        if TREE_TOKENS in methods:
            improve((p.method, p.rank_N) for p in packed()[:_MAX_PACKED])
        improve(starts)
    elif moves:
        improve([(p.method, p.rank_N) for p in plain if p.makespan == least][:1])
        if TREE_TOKENS in methods and not considered[-1].is_even():
            improve((p.method, p.rank_N) for p in packed()[:1])
    least = min(p.makespan for p in considered)
    best = min(
        (p for p in considered if p.makespan <= least * (1 + _TIE)),
        key=lambda p: (not p.keeps_limits(min_total), p.total),
    )
    positions = np.argsort(best.rank_N, kind="stable")
    ends = np.cumsum(np.bincount(best.rank_N, minlength=num_ranks))[:-1]
    parts = np.split(order.sequence_N[positions], ends)
    return Plan(
        assignments=tuple(tuple(part.tolist()) for part in parts),
        predicted_seconds=tuple(best.seconds.tolist()),
        method=best.method,
        num_moves=best.num_moves,
        num_sequence_tokens=order.num_sequence_tokens,
        num_tree_tokens=best.num_tree_tokens,
        num_repeated_tokens=best.num_tree_tokens - order.num_tree_tokens,
        candidates=tuple(
            Candidate(p.method, p.makespan, p.total, p.num_tree_tokens) for p in plain
        ),
        planning_seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Priced:
    method: str
    rank_N: IntArray
    num_moves: int
    seconds: FloatArray
    num_tree_tokens: int

    @property
    def makespan(self) -> float:
        return float(self.seconds.max())

    @property
    def total(self) -> float:
        return float(self.seconds.sum())

    def keeps_limits(self, min_total: float) -> bool:
        mean = self.total / len(self.seconds)
        return (
            self.makespan <= MAX_IMBALANCE * mean
            and self.total <= MAX_TOTAL * min_total
        )

    def is_even(self) -> bool:
        return self.makespan * len(self.seconds) <= _EVEN * self.total

    def is_good(self, min_total: float) -> bool:
        """Whether no other partition can be noticeably better."""
        mean = self.total / len(self.seconds)
        return self.makespan <= 1.006 * mean and self.total <= 1.005 * min_total


def _ranks_of(bounds: IntArray) -> IntArray:
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


_MAKE: dict[str, Callable[[LeafOrder, IntArray, RangePrices, int], IntArray]] = {
    CONTIGUOUS: lambda order, group_N, prices, num_ranks: _ranks_of(
        contiguous_cuts(prices, num_ranks)
    ),
    TREE_TOKENS: lambda order, group_N, prices, num_ranks: by_tree_tokens(
        order, group_N, num_ranks
    ),
    TOKENS: lambda order, group_N, prices, num_ranks: by_tokens(
        order, group_N, num_ranks
    ),
}
METHODS = tuple(_MAKE)


def groups_in_order(
    order: LeafOrder, groups: Sequence[int] | IntArray | None
) -> IntArray:
    """Groups [N] numbered 0, 1, ... by first appearance in depth-first order.

    Raises:
        ValueError: not one entry a sequence.
    """
    n = len(order)
    if groups is None:
        common = order.lcp_N[1:].min(initial=np.iinfo(np.int64).max)
        starts = order.lcp_N <= common
        starts[:1] = False
        return np.cumsum(starts).astype(np.int64)
    column = np.asarray(groups)
    if column.shape != (n,) or (n and column.dtype.kind not in "iu"):
        raise ValueError(
            f"groups has shape {column.shape}, dtype {column.dtype}; expected ({n},) "
            "integers: the prompt of each sequence"
        )
    _, first, number = np.unique(
        column[order.sequence_N], return_index=True, return_inverse=True
    )
    place = np.empty(len(first), np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(len(first))
    return place[number.reshape(-1)]
