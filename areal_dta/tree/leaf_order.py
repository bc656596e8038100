"""Sequences in depth-first order with what each shares with the one before it.

Two numbers a sequence, its length and its common prefix with its left neighbour, are
enough to know the tree tokens and attended pairs of any range or subset: planning
needs neither the tokens nor the nodes. In depth-first order the common prefix of two
sequences is the smallest of those in between.
"""

# N = sequences, in depth-first order; K = chosen ones

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_dta.tree.prefix_tree import (
    PrefixTree,
    TokenSequence,
    _as_tokens,
    _common_prefix,
)

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LeafOrder:
    """Lengths and neighbours' common prefixes in depth-first order."""

    sequence_N: IntArray
    """Numbers of the sequences, a permutation of 0..N-1 (of some, in a subset)."""
    length_N: IntArray
    """Tokens to compute of each; 0 where nothing is read."""
    lcp_N: IntArray
    """Tokens in common with the left neighbour; 0 for the first."""

    @classmethod
    def from_tree(
        cls,
        tree: PrefixTree,
        lengths: Sequence[int] | IntArray | None = None,
        tie_break: Sequence[int] | IntArray | None = None,
    ) -> LeafOrder:
        """Order of a tree's sequences, prefixes before what continues them.

        Args:
            lengths: tokens to compute of each sequence, from its front, by default
                all. (What lies below the last position that is read costs nothing.)
            tie_break: order of equal sequences, by default their numbers, which
                depend on the order of arrival.

        Cost: O(nodes + sequences x depth of the tree in nodes).

        Raises:
            ValueError: an argument has another number of entries, or a length is out
                of range.
        """
        n, nodes = tree.num_sequences, tree.nodes
        full = np.zeros(n, np.int64)
        end_node = np.zeros(n, np.int64)
        for node in nodes:
            for i in node.sequences:
                end_node[i], full[i] = node.index, node.end
        length = full if lengths is None else _column("lengths", lengths, n)
        wrong = np.flatnonzero((length < 0) | (length > full))
        if len(wrong):
            i = int(wrong[0])
            raise ValueError(
                f"lengths[{i}]={length[i]}; expected 0 to {full[i]}, the tokens of "
                f"sequence {i}"
            )
        start = np.array([node.start for node in nodes], np.int64)
        parent = np.array([node.parent for node in nodes], np.int64)
        first = np.array([node.first_token for node in nodes], np.int64)
        if n == 0:
            return cls.from_arrays([], [])
        at = end_node.copy()
        # up to the node that holds the last token to compute
        while len(above := np.flatnonzero((at >= 0) & (start[at] >= length))):
            at[above] = parent[at[above]]
        # its index among the tree tokens; those without any come first
        key = np.where(at < 0, -1, first[at] + length - start[at] - 1)
        ties = np.arange(n) if tie_break is None else _column("tie_break", tie_break, n)
        order = np.lexsort((np.arange(n), ties, key))
        at, length = at[order], length[order]
        lcp = np.zeros(n, np.int64)
        # The last common node of two neighbours is the parent of the shallowest node
        # between them.
        shallowest = _least_between(start, at)
        lcp[1:] = np.minimum(np.minimum(length[:-1], length[1:]), shallowest)
        return cls(order.astype(np.int64), length, lcp)

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[TokenSequence],
        tie_break: Sequence[int] | IntArray | None = None,
    ) -> LeafOrder:
        """The same without building a tree: O(tokens) beside one sort.

        Raises:
            ValueError: as ``PrefixTree.from_sequences``.
        """
        arrays = [_as_tokens(s, i) for i, s in enumerate(sequences)]
        n = len(arrays)
        ties = np.arange(n) if tie_break is None else _column("tie_break", tie_break, n)
        largest = max((int(a.max()) for a in arrays), default=0)
        big_endian = ">u4" if largest < 2**32 else ">u8"  # bytes sort as numbers do
        keys = [a.astype(big_endian).tobytes() for a in arrays]
        order = sorted(range(n), key=lambda i: (keys[i], int(ties[i]), i))
        lcp = np.zeros(n, np.int64)
        for k in range(1, n):
            lcp[k] = _common_prefix(arrays[order[k - 1]], arrays[order[k]])
        length = np.array([len(arrays[i]) for i in order], np.int64)
        return cls(np.array(order, np.int64), length, lcp)

    @classmethod
    def from_arrays(
        cls, lengths: Sequence[int] | IntArray, lcps: Sequence[int] | IntArray
    ) -> LeafOrder:
        """From lengths and common prefixes that are in depth-first order already.

        Raises:
            ValueError: they do not belong together.
        """
        length = np.asarray(lengths, np.int64)
        lcp = np.asarray(lcps, np.int64)
        if length.ndim != 1 or length.shape != lcp.shape:
            raise ValueError(
                f"lengths {length.shape} and lcps {lcp.shape}; expected 1-D and equal"
            )
        if len(lcp):
            most = np.minimum(length, np.concatenate([[0], length[:-1]]))
            wrong = np.flatnonzero((lcp < 0) | (lcp > most))
            if len(wrong):
                i = int(wrong[0])
                raise ValueError(
                    f"lcps[{i}]={lcp[i]}; expected 0 to {most[i]}: no more than "
                    "either neighbour is long, and 0 for the first"
                )
        return cls(np.arange(len(length), dtype=np.int64), length, lcp)

    def __len__(self) -> int:
        return len(self.length_N)

    @property
    def num_sequence_tokens(self) -> int:
        return int(self.length_N.sum())

    @property
    def num_tree_tokens(self) -> int:
        return int((self.length_N - self.lcp_N).sum())

    def positions_of(self, sequences: Sequence[int] | IntArray) -> IntArray:
        """Where sequences lie in the order, [K]."""
        place = np.empty(int(self.sequence_N.max(initial=-1)) + 1, np.int64)
        place[self.sequence_N] = np.arange(len(self))
        return place[np.asarray(sequences, np.int64)]

    def subset(self, positions_K: IntArray) -> LeafOrder:
        """Some sequences, by their increasing positions in this order."""
        lcp = np.zeros(len(positions_K), np.int64)
        lcp[1:] = range_min(self.lcp_N, positions_K[:-1] + 1, positions_K[1:] + 1)
        return LeafOrder(self.sequence_N[positions_K], self.length_N[positions_K], lcp)

    def grouped(self, label_N: IntArray) -> tuple[IntArray, LeafOrder]:
        """Positions sorted by label, then depth first; and these sequences in that
        order, the first of each label having nothing in common with its neighbour."""
        positions = np.argsort(label_N, kind="stable")
        label = label_N[positions]
        lcp = np.zeros(len(self), np.int64)
        same = np.flatnonzero(label[1:] == label[:-1]) + 1
        left, right = positions[same - 1], positions[same]
        lcp[same] = range_min(self.lcp_N, left + 1, right + 1)
        return positions, LeafOrder(
            self.sequence_N[positions], self.length_N[positions], lcp
        )


def range_min(values_N: IntArray, start_K: IntArray, end_K: IntArray) -> IntArray:
    """Smallest of ``values_N[start:end]`` for each of K non-empty ranges, [K].

    Levels of a sparse table, one at a time: O((N + K) log N) time, O(N + K) memory.
    """
    result = np.empty(len(start_K), np.int64)
    level = np.frexp((end_K - start_K).astype(np.float64))[1] - 1  # floor of log2
    table = values_N
    for k in range(int(level.max(initial=-1)) + 1):
        if k:
            half = 1 << (k - 1)
            table = np.minimum(table[:-half], table[half:])
        of = np.flatnonzero(level == k)
        last = end_K[of] - (1 << k)
        result[of] = np.minimum(table[start_K[of]], table[last])
    return result


def _least_between(start: IntArray, at: IntArray) -> IntArray:
    """For neighbours in ``at`` (node indices, -1 for none, rising) the smallest start
    of the nodes after the left one up to the right one; a large number if none."""
    result = np.full(max(0, len(at) - 1), np.iinfo(np.int64).max)
    differs = np.flatnonzero(at[:-1] != at[1:])
    result[differs] = range_min(start, at[differs] + 1, at[differs + 1] + 1)
    return result


def _column(name: str, values: Sequence[int] | IntArray, n: int) -> IntArray:
    column = np.asarray(values, np.int64)
    if column.shape != (n,):
        raise ValueError(
            f"{name} has shape {column.shape}; expected ({n},): one entry a sequence"
        )
    return column
