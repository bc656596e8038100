"""Who trains what: sequences to data-parallel ranks, all equally busy.

Three candidates are made: contiguous cuts of the depth-first order, first-fit by tree
tokens, and balancing by sequence tokens. Each is priced as a whole (see ``pricing``
for what is exact) and the one with the least makespan is used.

Invariants (tests/plan/test_partition.py):
  * every sequence is given to exactly one rank; any number of either, also none;
  * the plan depends on the sequences, not on the order in which they arrived;
  * a rank's sequences are in depth-first order.
"""

# N = sequences, in depth-first order

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from areal_dta.plan.baselines import by_tokens, by_tree_tokens
from areal_dta.plan.contiguous import contiguous_cuts
from areal_dta.plan.pricing import Pricing, RangePrices, price_subsets, rows_in_order
from areal_dta.tree.leaf_order import IntArray, LeafOrder

CONTIGUOUS, TREE_TOKENS, TOKENS = "contiguous", "tree_tokens", "tokens"
METHODS = (CONTIGUOUS, TREE_TOKENS, TOKENS)
_TIE = 1e-3  # relative: predictions are no better


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition that was considered."""

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
    """The one of METHODS that was chosen."""
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
    rows: Sequence[int] | IntArray | None = None,
    groups: Sequence[int] | IntArray | None = None,
    methods: Sequence[str] = METHODS,
) -> Plan:
    """Plan a batch.

    Args:
        order: ``LeafOrder.from_tree(tree)``, or made without a tree.
        rows: by sequence number, outputs read of it (vocabulary positions); by
            default as many as it has tokens.
        groups: by sequence number, its prompt, as any integers; what the two methods
            of the field keep together. By default the trees below what all share.

    Raises:
        ValueError: no rank, an unknown method, or arguments that do not fit.
    """
    start = time.perf_counter()
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}; expected at least 1")
    unknown = set(methods) - set(METHODS)
    if unknown or not methods:
        raise ValueError(f"methods={list(methods)}; expected some of {list(METHODS)}")
    rows_N = rows_in_order(order, rows)
    group_N = groups_in_order(order, groups)
    best: tuple[Candidate, IntArray, tuple[float, ...]] | None = None
    candidates = []
    for method in METHODS:
        if method not in methods:
            continue
        if method == CONTIGUOUS:
            bounds = contiguous_cuts(RangePrices(pricing, order, rows_N), num_ranks)
            rank_N = np.repeat(np.arange(num_ranks), np.diff(bounds))
        elif method == TREE_TOKENS:
            rank_N = by_tree_tokens(order, group_N, num_ranks)
        else:
            rank_N = by_tokens(order, group_N, num_ranks)
        seconds, tokens = price_subsets(pricing, order, rows_N, rank_N, num_ranks)
        candidate = Candidate(
            method, float(seconds.max()), float(seconds.sum()), int(tokens.sum())
        )
        candidates.append(candidate)
        if best is None or _is_better(candidate, best[0]):
            best = candidate, rank_N, tuple(seconds.tolist())
    assert best is not None
    chosen, rank_N, seconds_R = best
    positions = np.argsort(rank_N, kind="stable")
    ends = np.cumsum(np.bincount(rank_N, minlength=num_ranks))[:-1]
    parts = np.split(order.sequence_N[positions], ends)
    return Plan(
        assignments=tuple(tuple(part.tolist()) for part in parts),
        predicted_seconds=seconds_R,
        method=chosen.method,
        num_sequence_tokens=order.num_sequence_tokens,
        num_tree_tokens=chosen.num_tree_tokens,
        num_repeated_tokens=chosen.num_tree_tokens - order.num_tree_tokens,
        candidates=tuple(candidates),
        planning_seconds=time.perf_counter() - start,
    )


def _is_better(a: Candidate, b: Candidate) -> bool:
    if a.makespan_seconds < b.makespan_seconds * (1 - _TIE):
        return True
    if b.makespan_seconds < a.makespan_seconds * (1 - _TIE):
        return False
    return a.total_seconds < b.total_seconds


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
