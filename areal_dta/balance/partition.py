"""Plan which rank trains which sequences, so that all ranks are equally busy.

Three candidates are made: contiguous cuts of the depth-first order, first-fit by tree
tokens, and balance by sequence tokens. They, and packings of whole branches, are
improved by moving branches between ranks (``local_search``). Used is the plan with the
minimum makespan; among those within 0.5 % of it, one that keeps both limits if there is
one, and among these the one with the smallest total.

The limits, with t the total of the cheapest of the three candidates:

    slowest rank <= MAX_IMBALANCE * mean        total <= MAX_TOTAL * t

Both are kept on tau2-shaped batches with 30 sequences per rank, unless the episodes are
too large: no rank may then exceed MAX_IMBALANCE * MAX_TOTAL * t / num_ranks, and
tests/balance/bounds.py tells what any such partition costs. For 512 sequences of
recorded airline episodes both are kept on 10 ranks. On 12, two episodes have to be
split, which alone makes 1.047 t (1.055 t is reached, at 1.004 times the mean). On 16,
one sequence by itself takes 1.25 t / 16: the makespan comes first there. It also does
where a rank's share is about one episode: generated batches of 20 calls per episode are
all balanced, but some cost up to 1.07 t, and the bound does not tell whether they have
to.

Invariants (tests/balance/test_partition.py; the limits: tests/balance/test_balance.py):
  * every sequence is given to exactly one rank; any number of either, also none;
  * the plan depends on the sequences, not on the order in which they arrived;
  * a rank's sequences are in depth-first order.
"""

# N = sequences, in depth-first order; K = ranks

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
MAX_IMBALANCE, MAX_TOTAL = 1.05, 1.02  # the limits
_TIE = 5e-3  # relative, of the makespan: predictions are no better
_EVEN = 1.02  # slowest over mean: no need to pack many sequences
_GOOD = 1.006, 1.005  # slowest over mean, total over t: the search ends
_MAX_PRICINGS = 50_000  # in all, of a small batch: about half a second
_FEW_SEQUENCES = 5_000  # beyond, only the fastest start is improved
_WEIGHTS_OF_MANY = (0.4,)  # of ``local_search``, beyond


@dataclass(frozen=True, slots=True)
class Candidate:
    """Partition as one method makes it, before moves."""

    method: str
    makespan_seconds: float
    total_seconds: float
    num_tree_tokens: int
    """Sum over all ranks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sequences of each rank, and their predicted seconds."""

    assignments: tuple[tuple[int, ...], ...]
    """Indices of each rank's sequences in depth-first order; may be empty."""
    predicted_seconds: tuple[float, ...]
    """One entry per rank."""
    method: str
    """One of METHODS, which the plan started from (tree tokens, if from a packing)."""
    num_moves: int
    """Moves and swaps of branches between ranks since then."""
    num_sequence_tokens: int
    num_tree_tokens: int
    """Sum over the trees of all ranks."""
    num_repeated_tokens: int
    """Tree tokens beyond those of a single tree."""
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
        """Slowest rank over the mean, >= 1; 1.0 for an empty batch."""
        total = sum(self.predicted_seconds)
        return self.makespan_seconds * self.num_ranks / total if total else 1.0


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
        num_outputs: needed outputs per sequence; by default its tokens.
        groups: prompt of each sequence, as any integer. ``first_fit`` keeps prompts
            together. By default, sequences that share more than all do.
        methods: candidates to consider, by default all of METHODS.
        moves: whether they are improved by ``local_search``.

    Raises:
        ValueError: ``num_ranks`` is below 1, a method is unknown, or an argument does
            not have one entry per sequence.
    """
    start_time = time.perf_counter()
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}; expected at least 1")
    methods = METHODS if methods is None else methods
    if not methods or set(methods) - set(METHODS):
        raise ValueError(f"methods={list(methods)}; expected some of {list(METHODS)}")
    num_outputs_N = outputs_in_order(order, num_outputs)
    group_N = groups_in_order(order, groups)
    prices = RangePrices(pricing, order, num_outputs_N)

    def priced(method: str, rank_N: IntArray, num_moves: int = 0) -> _Priced:
        args = pricing, order, num_outputs_N, rank_N, num_ranks
        seconds_K, tokens_K = price_subsets(*args)
        return _Priced(method, rank_N, num_moves, seconds_K, int(tokens_K.sum()))

    # The candidates as they are.
    plain = [
        priced(method, _MAKE[method](order, group_N, prices, num_ranks))
        for method in METHODS
        if method in methods
    ]
    considered = list(plain)
    cheapest = min(p.total for p in plain)
    is_small = len(order) <= _FEW_SEQUENCES
    weights = WEIGHTS if is_small else _WEIGHTS_OF_MANY
    pricings_left = _MAX_PRICINGS

    def pack() -> list[_Priced]:
        """Consider packings; return them, the fastest first."""
        made: list[_Priced] = []
        for rank_N in packings(pricing, order, prices, num_ranks):
            made.append(priced(TREE_TOKENS, rank_N))
            if made[-1].is_good(cheapest):
                break
        considered.extend(made)
        return sorted(made, key=lambda p: p.makespan)

    def improve(starts: Iterable[_Priced]) -> None:
        """Consider what moves make of each start, until one is good."""
        nonlocal pricings_left
        for start in starts:
            if pricings_left <= 0 or considered[-1].is_good(cheapest):
                return
            moved_N, num_moves, num_pricings = local_search(
                pricing, order, prices, start.rank_N, num_ranks, weights
            )
            considered.append(priced(start.method, moved_N, num_moves))
            pricings_left -= num_pricings

    # Improve packings first, then the candidates. Of a large batch only the fastest
    # candidate, and one packing where that is not enough.
    if moves and is_small:
        improve(pack() if TREE_TOKENS in methods else ())
        improve(plain)
    elif moves:
        improve([min(plain, key=lambda p: p.makespan)])
        if TREE_TOKENS in methods and not considered[-1].is_even():
            improve(pack()[:1])

    # Choose, and list each rank's sequences in depth-first order.
    fastest = min(p.makespan for p in considered)
    best = min(
        (p for p in considered if p.makespan <= fastest * (1 + _TIE)),
        key=lambda p: (not p.keeps_limits(cheapest), p.total),
    )
    positions = np.argsort(best.rank_N, kind="stable")
    ends = np.cumsum(np.bincount(best.rank_N, minlength=num_ranks))[:-1]
    parts = np.split(order.sequence_N[positions], ends)
    return Plan(
        assignments=tuple(tuple(part.tolist()) for part in parts),
        predicted_seconds=tuple(best.seconds_K.tolist()),
        method=best.method,
        num_moves=best.num_moves,
        num_sequence_tokens=order.num_sequence_tokens,
        num_tree_tokens=best.num_tree_tokens,
        num_repeated_tokens=best.num_tree_tokens - order.num_tree_tokens,
        candidates=tuple(
            Candidate(p.method, p.makespan, p.total, p.num_tree_tokens) for p in plain
        ),
        planning_seconds=time.perf_counter() - start_time,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Priced:
    method: str
    rank_N: IntArray
    num_moves: int
    seconds_K: FloatArray
    num_tree_tokens: int

    @property
    def makespan(self) -> float:
        return float(self.seconds_K.max())

    @property
    def total(self) -> float:
        return float(self.seconds_K.sum())

    def keeps_limits(self, cheapest: float) -> bool:
        mean = self.total / len(self.seconds_K)
        return (
            self.makespan <= MAX_IMBALANCE * mean and self.total <= MAX_TOTAL * cheapest
        )

    def is_even(self) -> bool:
        return self.makespan * len(self.seconds_K) <= _EVEN * self.total

    def is_good(self, cheapest: float) -> bool:
        """Whether no other partition can be noticeably better."""
        mean = self.total / len(self.seconds_K)
        return self.makespan <= _GOOD[0] * mean and self.total <= _GOOD[1] * cheapest


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
    """Number the groups [N] 0, 1, ... by first appearance in depth-first order.

    Raises:
        ValueError: there is not one integer per sequence.
    """
    n = len(order)
    if groups is None:
        starts = order.lcp_N <= order.num_common_tokens
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
