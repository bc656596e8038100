"""Two partitions used in practice: whole prompts, balanced by a token count.

They are candidates of ``partition`` and the baselines of its benchmark.
"""

# N = sequences, in depth-first order; U = units, which stay together

from __future__ import annotations

import heapq

import numpy as np

from areal_dta.tree.leaf_order import IntArray, LeafOrder

_ROOM = (1.0, 1.01, 1.02, 1.05, 1.1)  # of a rank over the mean load; the best is used
_MANY_UNITS = 20_000  # beyond, one trial: a plan has to be quick


def by_tokens(order: LeafOrder, group_N: IntArray, num_ranks: int) -> IntArray:
    """Return the rank of each sequence [N], balanced by sequence tokens as AReaL does.

    The largest group goes first, to the rank with the fewest tokens. Where groups are
    fewer than ranks, each sequence is a group.
    """
    unit_N = group_N
    if len(np.unique(group_N)) < num_ranks:
        unit_N = np.arange(len(order))
    tokens_U = np.bincount(unit_N, order.length_N).astype(np.int64)
    rank_U = np.zeros(len(tokens_U), np.int64)
    loads = [(0, rank) for rank in range(num_ranks)]
    for unit in np.argsort(-tokens_U, kind="stable").tolist():
        load, rank = loads[0]
        rank_U[unit] = rank
        heapq.heapreplace(loads, (load + int(tokens_U[unit]), rank))
    return rank_U[unit_N]


def by_tree_tokens(order: LeafOrder, group_N: IntArray, num_ranks: int) -> IntArray:
    """Return the rank of each sequence [N]: first-fit decreasing by tree tokens.

    Units are prompt trees; one beyond a rank's share is split along the depth-first
    order. The prefix common to all is not counted: every rank pays for it.
    """
    if not len(order):
        return np.zeros(0, np.int64)
    positions, grouped = order.grouped(group_N)
    common = order.num_common_tokens
    length = grouped.length_N - common
    lcp = np.maximum(grouped.lcp_N - common, 0)
    group = group_N[positions]
    share = -(-int((length - lcp).sum()) // num_ranks)
    starts = _unit_starts(length, lcp, group, share)
    unit_N = np.cumsum(starts) - 1
    own = np.where(starts, length, length - lcp)
    rank_U = _first_fit(np.bincount(unit_N, own).astype(np.int64), num_ranks)
    rank_N = np.empty(len(order), np.int64)
    rank_N[positions] = rank_U[unit_N]
    return rank_N


def _unit_starts(
    length: IntArray, lcp: IntArray, group: IntArray, share: int
) -> np.ndarray:
    """Return where units start [N]: with each group, and within a group wherever
    ``share`` tokens are exceeded."""
    n = len(length)
    starts = np.concatenate([[True], group[1:] != group[:-1]])
    first = np.flatnonzero(starts)
    end = np.concatenate([first[1:], [n]])
    before = np.concatenate([[0], np.cumsum(length - lcp)])
    large = np.flatnonzero(before[end] - before[first] > share)
    for g in large.tolist():
        at, stop = int(first[g]), int(end[g])
        while at < stop:
            starts[at] = True
            reach = before[at] - lcp[at] + share
            at = max(at + 1, int(before.searchsorted(reach, side="right")) - 1)
    return np.asarray(starts)


def _first_fit(tokens_U: IntArray, num_ranks: int) -> IntArray:
    """Return the rank of each unit; what fits nowhere goes to the emptiest rank."""
    order = np.argsort(-tokens_U, kind="stable").tolist()
    mean = float(tokens_U.sum()) / num_ranks
    best: tuple[float, IntArray] | None = None
    for room in _ROOM if len(tokens_U) <= _MANY_UNITS else _ROOM[2:3]:
        free = np.full(num_ranks, mean * room)
        rank_U = np.zeros(len(tokens_U), np.int64)
        for unit in order:
            size = tokens_U[unit]
            fits = free >= size
            rank = int(fits.argmax())
            if not fits[rank]:
                rank = int(free.argmax())
            free[rank] -= size
            rank_U[unit] = rank
        max_load = mean * room - float(free.min())
        if best is None or max_load < best[0]:
            best = max_load, rank_U
    assert best is not None
    return best[1]
