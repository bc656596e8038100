"""The prefix forest of the sequences that wait, always in depth-first order.

Sequences are kept sorted by their token ids; with the common prefix of neighbours that
is the forest: a sequence adds to it what it does not share with its left neighbour.
Hence inserting and removing touch two neighbours only, and nothing depends on the order
of arrival. Tokens are all that is shared: who a sequence belongs to stays with it.
"""

# N = sequences in depth-first order

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_dta.tree.leaf_order import LeafOrder

Owner = tuple[int, int]
"""Number of the trajectory group, row in it. Also the order of equal sequences."""


@dataclass(frozen=True, slots=True)
class ForestStats:
    """Counts of one tree, or of all."""

    num_sequences: int = 0
    sequence_tokens: int = 0
    tree_tokens: int = 0
    pairs: int = 0
    """(query, key) pairs that attention computes."""
    num_outputs: int = 0
    """Outputs that are read, shared ones counted once."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    key: tuple[bytes, Owner]
    """Token ids, big-endian: bytes sort as the ids do."""
    needed_outputs: NDArray[np.int32]
    """Depths of the tokens whose logprob is read, rising."""

    @property
    def tokens(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.key[0], ">u4")

    @property
    def num_tokens(self) -> int:
        return len(self.key[0]) // 4

    def branch(self, shared: int) -> _Counts:
        """What it adds to a forest whose sequences share its first tokens."""
        length = self.num_tokens
        return (
            1,
            length,
            length - shared,
            (length * (length + 1) - shared * (shared + 1)) // 2,
            len(self.needed_outputs) - int(self.needed_outputs.searchsorted(shared)),
        )


_Counts = tuple[int, int, int, int, int]  # in the order of ForestStats' fields


class PrefixForest:
    """Insert and remove cost O(log N) comparisons and one of neighbours' tokens.

    Not thread-safe. Memory: 4 bytes a sequence token, and 4 an output that is read.
    """

    def __init__(self) -> None:
        self._leaves: list[_Leaf] = []
        self._keys: list[tuple[bytes, Owner]] = []
        self._shared: list[int] = []  # with the left neighbour
        self._key_of: dict[Owner, tuple[bytes, Owner]] = {}
        self._trees: dict[int, list[int]] = {}  # counts, by first token
        self._total = [0] * 5

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._key_of

    @property
    def total(self) -> ForestStats:
        return ForestStats(*self._total)

    @property
    def trees(self) -> dict[int, ForestStats]:
        """By first token: sequences share a tree iff they share that."""
        return {root: ForestStats(*counts) for root, counts in self._trees.items()}

    def insert(
        self,
        owner: Owner,
        tokens: NDArray[np.integer],
        needed_outputs: NDArray[np.integer],
    ) -> None:
        """
        Args:
            tokens: ids, 1-D, at least one, 0 <= id < 2**32.
            needed_outputs: depths of the tokens whose logprob is read, rising.
        """
        assert owner not in self._key_of and len(tokens), owner
        key = (tokens.astype(">u4").tobytes(), owner)
        leaf = _Leaf(key, needed_outputs.astype(np.int32))
        at = bisect_left(self._keys, key)
        shared = _common(self._leaves[at - 1], leaf) if at else 0
        if at < len(self._leaves):  # the right neighbour has a new left one
            self._share(at, _common(leaf, self._leaves[at]))
        self._count(leaf, shared, 1)
        self._leaves.insert(at, leaf)
        self._keys.insert(at, key)
        self._shared.insert(at, shared)
        self._key_of[owner] = key

    def remove(self, owner: Owner) -> None:
        at = bisect_left(self._keys, self._key_of.pop(owner))
        leaf, shared = self._leaves.pop(at), self._shared.pop(at)
        del self._keys[at]
        if at < len(self._leaves):
            # in sorted order: what all three share, or what the outer two do
            self._share(at, min(shared, self._shared[at]))
        self._count(leaf, shared, -1)

    def _share(self, at: int, shared: int) -> None:
        """A leaf has another left neighbour."""
        if shared != self._shared[at]:
            leaf = self._leaves[at]
            self._count(leaf, self._shared[at], -1)
            self._count(leaf, shared, 1)
            self._shared[at] = shared

    def owners(self) -> list[Owner]:
        """In depth-first order, equal sequences by their numbers."""
        return [owner for _, owner in self._keys]

    def tokens(self, owner: Owner) -> NDArray[np.uint32]:
        return np.frombuffer(self._key_of[owner][0], ">u4")

    def order(self, groups: Iterable[int]) -> tuple[list[Owner], LeafOrder]:
        """Some groups' sequences in depth-first order.

        Returns:
            The owner of each, and lengths and common prefixes in the same order; the
            numbers in it count along ``owners``.
        """
        wanted = set(groups)
        places = [i for i, (_, (g, _)) in enumerate(self._keys) if g in wanted]
        owners = [self._keys[i][1] for i in places]
        whole = LeafOrder.from_arrays(
            [leaf.num_tokens for leaf in self._leaves], self._shared
        )
        chosen = whole.subset(np.array(places, np.int64))
        numbers = np.arange(len(owners), dtype=np.int64)
        return owners, LeafOrder(numbers, chosen.length_N, chosen.lcp_N)

    def num_outputs(self, owner: Owner) -> int:
        """Outputs that are read of a sequence."""
        return len(self._leaf(owner).needed_outputs)

    def stats(self, owners: Sequence[Owner], order: LeafOrder) -> ForestStats:
        """Of the forest of some sequences by themselves, as ``order`` gave them."""
        sums = [0] * 5
        for owner, shared in zip(owners, order.lcp_N.tolist(), strict=True):
            for i, count in enumerate(self._leaf(owner).branch(shared)):
                sums[i] += count
        return ForestStats(*sums)

    def _leaf(self, owner: Owner) -> _Leaf:
        return self._leaves[bisect_left(self._keys, self._key_of[owner])]

    def _count(self, leaf: _Leaf, shared: int, sign: int) -> None:
        root = int.from_bytes(leaf.key[0][:4], "big")
        tree = self._trees.setdefault(root, [0] * 5)
        for i, count in enumerate(leaf.branch(shared)):
            tree[i] += sign * count
            self._total[i] += sign * count
        if not tree[0]:
            del self._trees[root]


def _common(a: _Leaf, b: _Leaf) -> int:
    n = min(a.num_tokens, b.num_tokens)
    differs = a.tokens[:n] != b.tokens[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
