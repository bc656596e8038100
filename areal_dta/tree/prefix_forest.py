"""The prefix forest of the sequences that wait, always in depth-first order.

Sequences are kept sorted by their token ids; with the common prefix of neighbours that
is the forest: a sequence adds to it what it does not share with its left neighbour.
Hence inserting and removing touch two neighbours only, and nothing depends on the order
of arrival. Only tokens are shared: whatever else a sequence has stays with its owner.
"""

# N = sequences in depth-first order

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_dta.tree.leaf_order import LeafOrder
from areal_dta.tree.prefix_tree import attended_pairs, common_prefix

Owner = tuple[int, int]
"""(id of the group of trajectories, row in it). Also the order of equal sequences."""


@dataclass(frozen=True, slots=True)
class ForestStats:
    """Counts of one tree, or of all."""

    num_sequences: int = 0
    num_sequence_tokens: int = 0
    num_tree_tokens: int = 0
    num_pairs: int = 0
    """(query, key) pairs that attention computes."""
    num_outputs: int = 0
    """Outputs that the loss reads, shared ones counted once."""


_Counts = tuple[int, int, int, int, int]  # in the order of ForestStats' fields


@dataclass(frozen=True, slots=True)
class Leaf:
    """A sequence in the forest."""

    key: tuple[bytes, Owner]
    """Token ids, big-endian: bytes sort as the ids do."""
    needed_outputs: NDArray[np.int32]
    """Depths of the tokens whose output the loss reads, rising."""

    @property
    def tokens(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.key[0], ">u4")

    @property
    def num_tokens(self) -> int:
        return len(self.key[0]) // 4

    def counts(self, shared: int) -> _Counts:
        """Count what it adds to a forest that holds its first ``shared`` tokens."""
        length = self.num_tokens
        return (
            1,
            length,
            length - shared,
            attended_pairs(shared, length),
            # int32 as they are: another type would have all of them converted first
            len(self.needed_outputs)
            - int(self.needed_outputs.searchsorted(np.int32(shared))),
        )


class PrefixForest:
    """Sorted sequences with the common prefix of neighbours.

    Inserting and removing compare O(log N) times, and the tokens of two neighbours. Not
    thread-safe. Memory: 4 bytes per sequence token and per needed output.
    """

    def __init__(self) -> None:
        self._leaves: list[Leaf] = []
        self._keys: list[tuple[bytes, Owner]] = []  # of the leaves: to bisect in
        self._shared: list[int] = []  # tokens in common with the left neighbour
        self._leaf_of: dict[Owner, Leaf] = {}
        self._trees: dict[int, list[int]] = {}  # counts, by first token
        self._total = [0] * 5

    @property
    def total(self) -> ForestStats:
        return ForestStats(*self._total)

    @property
    def trees(self) -> dict[int, ForestStats]:
        """Stats by first token: sequences share a tree if and only if they share it."""
        return {root: ForestStats(*counts) for root, counts in self._trees.items()}

    def insert(
        self,
        owner: Owner,
        tokens: NDArray[np.integer],
        needed_outputs: NDArray[np.integer],
    ) -> None:
        """Insert a sequence.

        Args:
            tokens: ids, 1-D, at least one, 0 <= id < 2**32.
            needed_outputs: depths of the tokens whose output the loss reads, rising.
        """
        assert owner not in self._leaf_of and len(tokens), owner
        key = (tokens.astype(">u4").tobytes(), owner)
        leaf = Leaf(key, needed_outputs.astype(np.int32))
        at = bisect_left(self._keys, key)
        shared = common_prefix(self._leaves[at - 1].tokens, leaf.tokens) if at else 0
        if at < len(self._leaves):  # the right neighbour has a new left one
            self._set_shared(at, common_prefix(leaf.tokens, self._leaves[at].tokens))
        self._count(leaf, shared, 1)
        self._leaves.insert(at, leaf)
        self._keys.insert(at, key)
        self._shared.insert(at, shared)
        self._leaf_of[owner] = leaf

    def remove(self, owner: Owner) -> None:
        at = bisect_left(self._keys, self._leaf_of.pop(owner).key)
        leaf, shared = self._leaves.pop(at), self._shared.pop(at)
        del self._keys[at]
        if at < len(self._leaves):
            # Sorted: the outer two have in common what all three have.
            self._set_shared(at, min(shared, self._shared[at]))
        self._count(leaf, shared, -1)

    def order(self, group_ids: Iterable[int]) -> tuple[list[Owner], LeafOrder]:
        """Return the sequences of some groups in depth-first order.

        Returns:
            Their owners, and their lengths and common prefixes in the same order, with
            sequence ids that count along the owners.
        """
        chosen = set(group_ids)
        places = [i for i, (_, (g, _)) in enumerate(self._keys) if g in chosen]
        whole = LeafOrder.from_arrays(
            [leaf.num_tokens for leaf in self._leaves], self._shared
        )
        part = whole.subset(np.array(places, np.int64))
        order = LeafOrder.from_arrays(part.length_N, part.lcp_N)
        return [self._keys[i][1] for i in places], order

    def leaf(self, owner: Owner) -> Leaf:
        return self._leaf_of[owner]

    def stats(self, owners: Sequence[Owner], order: LeafOrder) -> ForestStats:
        """Count the forest of some sequences by themselves, as ``order`` gave them."""
        sums = [0] * 5
        for owner, shared in zip(owners, order.lcp_N.tolist(), strict=True):
            for i, count in enumerate(self._leaf_of[owner].counts(shared)):
                sums[i] += count
        return ForestStats(*sums)

    def _set_shared(self, at: int, shared: int) -> None:
        """Update a leaf that has another left neighbour now."""
        if shared != self._shared[at]:
            leaf = self._leaves[at]
            self._count(leaf, self._shared[at], -1)
            self._count(leaf, shared, 1)
            self._shared[at] = shared

    def _count(self, leaf: Leaf, shared: int, sign: int) -> None:
        root = int.from_bytes(leaf.key[0][:4], "big")
        tree = self._trees.setdefault(root, [0] * 5)
        for i, count in enumerate(leaf.counts(shared)):
            tree[i] += sign * count
            self._total[i] += sign * count
        if not tree[0]:
            del self._trees[root]
