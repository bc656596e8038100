"""Sequences in depth-first order, with the prefix that each shares with the one before.

Two numbers per sequence, its length and the common prefix (lcp) with its left
neighbour, give the tree tokens and attended pairs of any range or subset: balancing
needs neither tokens nor nodes. For sequences i < j in depth-first order

    lcp(i, j) = min(lcp_N[i + 1 .. j])

(tests/tree/test_leaf_order.py compares subsets with trees that are built.)
"""

# N = sequences, in depth-first order; K = some of them, or ranges of them

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_dta.tree.prefix_tree import PrefixTree

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LeafOrder:
    """Lengths and neighbours' common prefixes in depth-first order."""

    sequence_N: IntArray
    """Index of each sequence: a permutation of 0..N-1, or some of it in a subset."""
    length_N: IntArray
    """Tokens to compute per sequence; 0 where no output is needed."""
    lcp_N: IntArray
    """Tokens in common with the left neighbour; 0 for the first."""

    @classmethod
    def from_tree(
        cls, tree: PrefixTree, lengths: Sequence[int] | IntArray | None = None
    ) -> LeafOrder:
        """Order the sequences of a tree, prefixes before their continuations.

        Equal sequences are ordered by their indices.

        Args:
            lengths: tokens to compute per sequence, from its front; by default all.
                (Tokens below the last needed output cost nothing.)

        Cost: O(nodes + sequences x depth of the tree in nodes).

        Raises:
            ValueError: there is not one length per sequence, or one is out of range.
        """
        n, nodes = tree.num_sequences, tree.nodes
        # Check the lengths against the full ones.
        full = np.zeros(n, np.int64)
        end_node = np.zeros(n, np.int64)
        for node in nodes:
            for i in node.sequences:
                end_node[i], full[i] = node.index, node.end
        length = full if lengths is None else np.asarray(lengths, np.int64)
        if length.shape != (n,):
            raise ValueError(
                f"lengths has shape {length.shape}; expected ({n},): one per sequence"
            )
        wrong = np.flatnonzero((length < 0) | (length > full))
        if len(wrong):
            i = int(wrong[0])
            raise ValueError(
                f"lengths[{i}]={length[i]}; expected 0 to {full[i]}, the tokens of "
                f"sequence {i}"
            )
        if n == 0:
            return cls.from_arrays([], [])
        # Sort by the tree index of the last token to compute, which lies at or above
        # the node where the sequence ends. Sequences without any come first.
        start = np.array([node.start for node in nodes], np.int64)
        parent = np.array([node.parent for node in nodes], np.int64)
        first = np.array([node.first_token for node in nodes], np.int64)
        at = end_node.copy()
        while len(above := np.flatnonzero((at >= 0) & (start[at] >= length))):
            at[above] = parent[at[above]]
        key = np.where(at < 0, -1, first[at] + length - start[at] - 1)
        order = np.argsort(key, kind="stable")
        at, length = at[order], length[order]
        # Neighbours that end in one node share the shorter one's length. Others part at
        # the end of their last common node: the parent of the shallowest node between.
        lcp = np.zeros(n, np.int64)
        lcp[1:] = np.minimum(length[:-1], length[1:])
        differs = np.flatnonzero(at[:-1] != at[1:])
        fork = range_min(start, at[differs] + 1, at[differs + 1] + 1)
        lcp[differs + 1] = np.minimum(lcp[differs + 1], fork)
        return cls(order.astype(np.int64), length, lcp)

    @classmethod
    def from_arrays(
        cls, lengths: Sequence[int] | IntArray, lcps: Sequence[int] | IntArray
    ) -> LeafOrder:
        """Wrap lengths and common prefixes that are in depth-first order already.

        Raises:
            ValueError: the arrays do not belong together.
        """
        length = np.asarray(lengths, np.int64)
        lcp = np.asarray(lcps, np.int64)
        if length.ndim != 1 or length.shape != lcp.shape:
            raise ValueError(
                f"lengths {length.shape} and lcps {lcp.shape}; expected 1-D and equal"
            )
        if len(lcp):
            max_lcp = np.minimum(length, np.concatenate([[0], length[:-1]]))
            wrong = np.flatnonzero((lcp < 0) | (lcp > max_lcp))
            if len(wrong):
                i = int(wrong[0])
                raise ValueError(
                    f"lcps[{i}]={lcp[i]}; expected 0 to {max_lcp[i]}: at most the "
                    "length of either neighbour, and 0 for the first"
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

    @property
    def num_common_tokens(self) -> int:
        """Length of the prefix that all sequences share; 0 without sequences."""
        if not len(self):
            return 0
        return int(self.lcp_N[1:].min(initial=self.length_N[0]))

    def subset(self, positions_K: IntArray) -> LeafOrder:
        """Return the order of some sequences, chosen by increasing positions."""
        lcp = np.zeros(len(positions_K), np.int64)
        lcp[1:] = range_min(self.lcp_N, positions_K[:-1] + 1, positions_K[1:] + 1)
        return LeafOrder(self.sequence_N[positions_K], self.length_N[positions_K], lcp)

    def grouped(self, label_N: IntArray) -> tuple[IntArray, LeafOrder]:
        """Sort positions by label, then depth first.

        Returns:
            The positions [N], and the sequences in that order. The first sequence of
            each label has lcp 0: labels share nothing.
        """
        positions = np.argsort(label_N, kind="stable")
        label = label_N[positions]
        lcp = np.zeros(len(self), np.int64)
        same = np.flatnonzero(label[1:] == label[:-1]) + 1
        lcp[same] = range_min(self.lcp_N, positions[same - 1] + 1, positions[same] + 1)
        return positions, LeafOrder(
            self.sequence_N[positions], self.length_N[positions], lcp
        )


class RangeMin:
    """Sparse table: ``minimum of values_N[start:end]`` in O(1) per range.

    Level k holds the minimum of each run of 2**k values; two of them cover a range.
    Memory: O(N log max_length).
    """

    def __init__(self, values_N: IntArray, max_length: int) -> None:
        levels, width = [values_N], 1
        while 2 * width <= max_length:
            level = levels[-1].copy()  # its tail, without a full run, is never asked
            level[:-width] = np.minimum(level[:-width], level[width:])
            levels.append(level)
            width *= 2
        self._levels = np.stack(levels)

    def __call__(self, start_K: IntArray, end_K: IntArray) -> IntArray:
        """Return the minimum of each non-empty range, [K]."""
        level = np.frexp((end_K - start_K).astype(np.float64))[1] - 1  # floor of log2
        left = self._levels[level, start_K]
        right = self._levels[level, end_K - 2**level]
        smallest: IntArray = np.minimum(left, right)
        return smallest


def range_min(values_N: IntArray, start_K: IntArray, end_K: IntArray) -> IntArray:
    """Return the minimum of ``values_N[start:end]`` for K non-empty ranges, [K]."""
    if not len(start_K):
        return np.zeros(0, np.int64)
    return RangeMin(values_N, int((end_K - start_K).max()))(start_K, end_K)
