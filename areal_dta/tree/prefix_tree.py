"""Prefix tree of token sequences: each shared prefix is stored once.

The tree is a *forest* without an artificial root: sequences that share no first
token start separate roots. Node order is canonical (depth first, siblings by first
token): it depends on the sequences, not on the order in which they arrived.

Invariants (``check_tree`` in tests/tree/test_prefix_tree.py):
  * no node is empty; siblings start with different tokens;
  * a node has several children or ends at least one sequence;
  * the tokens along the path of sequence i are exactly sequence i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.int64]
TokenSequence = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A branch-free run of tokens, at depth ``[start, end)`` of its paths."""

    index: int
    """Position in depth-first order."""
    tokens: TokenArray
    """[end - start], int64. A view: do not write to it."""
    start: int
    """Depth of the first token: the number of path tokens above this node."""
    first_token: int
    """Index of the first token among all tree tokens in depth-first order."""
    parent: int
    """Index of the parent node, -1 for a root."""
    children: tuple[int, ...]
    sequences: tuple[int, ...]
    """The sequences that end with this node's last token (duplicates together)."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class _Run:
    """Mutable node, used before the depth-first order is fixed."""

    __slots__ = ("tokens", "start", "parent", "children", "sequences")

    def __init__(self, tokens: TokenArray, start: int, parent: _Run | None) -> None:
        self.tokens = tokens
        self.start = start
        self.parent = parent
        self.children: dict[int, _Run] = {}
        self.sequences: list[int] = []

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class PrefixTree:
    """Prefix tree (a forest) over the sequences inserted so far.

    Inserting costs O(length of the sequence). The depth-first view (``nodes``,
    ``path``) is rebuilt on demand after a change, in O(nodes).
    """

    def __init__(self) -> None:
        self._roots: dict[int, _Run] = {}
        self._last_run: list[_Run] = []  # where each sequence ends
        self._num_sequence_tokens = 0
        self._num_tree_tokens = 0
        self._nodes: tuple[TreeNode, ...] | None = None
        self._end_node: list[int] = []

    @classmethod
    def from_sequences(cls, sequences: Iterable[TokenSequence]) -> PrefixTree:
        """Build the tree of a batch; sequence i keeps the index i.

        Args:
            sequences: lists or 1-D integer arrays of token ids >= 0, in any order;
                duplicates, strict prefixes and single tokens are fine.

        Raises:
            ValueError: a sequence is empty, not 1-D, not integer, or holds a negative
                id; the message names it.
        """
        arrays = [_as_tokens(s, i) for i, s in enumerate(sequences)]
        tree = cls()
        tree._last_run = [None] * len(arrays)  # type: ignore[list-item]
        # In sorted order a sequence leaves its left neighbour's path only upwards, so
        # the open path is a stack and every token is compared once.
        order = sorted(
            range(len(arrays)), key=lambda i: arrays[i].astype(">u8").tobytes()
        )
        stack: list[_Run] = []
        previous: TokenArray | None = None
        for i in order:
            tokens = arrays[i]
            shared = 0 if previous is None else common_prefix(previous, tokens)
            while stack and stack[-1].start >= shared:
                stack.pop()
            if stack and shared < stack[-1].end:
                stack[-1] = tree._split(stack[-1], shared)
            tree._attach(i, tokens, shared, stack[-1] if stack else None)
            if tree._last_run[i] is not (stack[-1] if stack else None):
                stack.append(tree._last_run[i])
            previous = tokens
        return tree

    def insert(self, sequence: TokenSequence) -> int:
        """Add a sequence and return its index. Raises as ``from_sequences``."""
        index = len(self._last_run)
        tokens = _as_tokens(sequence, index)
        parent: _Run | None = None
        depth = 0
        while depth < len(tokens):
            siblings = self._roots if parent is None else parent.children
            run = siblings.get(int(tokens[depth]))
            if run is None:
                break
            shared = common_prefix(run.tokens, tokens[depth:])
            if shared < len(run.tokens):
                parent = self._split(run, depth + shared)
                depth += shared
                break
            parent, depth = run, depth + shared
        self._last_run.append(None)  # type: ignore[arg-type]
        self._attach(index, tokens, depth, parent)
        return index

    def _split(self, run: _Run, depth: int) -> _Run:
        """Cut ``run`` at ``depth``; return the new upper part."""
        cut = depth - run.start
        assert 0 < cut < len(run.tokens)
        upper = _Run(run.tokens[:cut], run.start, run.parent)
        siblings = self._roots if run.parent is None else run.parent.children
        siblings[int(upper.tokens[0])] = upper
        run.tokens, run.start, run.parent = run.tokens[cut:], depth, upper
        upper.children[int(run.tokens[0])] = run
        self._nodes = None
        return upper

    def _attach(
        self, index: int, tokens: TokenArray, shared: int, parent: _Run | None
    ) -> None:
        """End sequence ``index`` below ``parent``, which covers ``shared`` tokens."""
        if shared < len(tokens):
            # A copy of what is new, so that the tree does not keep the rest alive.
            rest = tokens[shared:].copy() if shared else tokens
            run = _Run(rest, shared, parent)
            siblings = self._roots if parent is None else parent.children
            siblings[int(rest[0])] = run
            self._num_tree_tokens += len(rest)
        else:
            assert parent is not None
            run = parent
        run.sequences.append(index)
        self._last_run[index] = run
        self._num_sequence_tokens += len(tokens)
        self._nodes = None

    @property
    def num_sequences(self) -> int:
        return len(self._last_run)

    @property
    def num_sequence_tokens(self) -> int:
        """Tokens of all sequences, shared ones counted for each."""
        return self._num_sequence_tokens

    @property
    def num_tree_tokens(self) -> int:
        """Tokens of the tree, shared ones counted once."""
        return self._num_tree_tokens

    @property
    def sharing_ratio(self) -> float:
        """Sequence tokens over tree tokens, >= 1; 1.0 for an empty tree."""
        if self._num_tree_tokens == 0:
            return 1.0
        return self._num_sequence_tokens / self._num_tree_tokens

    @property
    def max_depth(self) -> int:
        """Tokens of the longest sequence; 0 for an empty tree."""
        return max((run.end for run in self._last_run), default=0)

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """All nodes in depth-first order."""
        if self._nodes is None:
            self._nodes = self._depth_first()
        return self._nodes

    def _depth_first(self) -> tuple[TreeNode, ...]:
        runs: list[_Run] = []
        stack = [run for _, run in sorted(self._roots.items(), reverse=True)]
        while stack:
            run = stack.pop()
            runs.append(run)
            stack += [child for _, child in sorted(run.children.items(), reverse=True)]
        number = {id(run): i for i, run in enumerate(runs)}
        self._end_node = [number[id(run)] for run in self._last_run]
        nodes, first_token = [], 0
        for i, run in enumerate(runs):
            nodes.append(
                TreeNode(
                    index=i,
                    tokens=run.tokens,
                    start=run.start,
                    first_token=first_token,
                    parent=-1 if run.parent is None else number[id(run.parent)],
                    children=tuple(
                        number[id(c)] for _, c in sorted(run.children.items())
                    ),
                    sequences=tuple(sorted(run.sequences)),
                )
            )
            first_token += len(run.tokens)
        return tuple(nodes)

    def path(self, sequence: int) -> list[int]:
        """Return the node indices of a sequence, root first."""
        nodes = self.nodes
        path = [self._end_node[sequence]]
        while (parent := nodes[path[-1]].parent) >= 0:
            path.append(parent)
        return path[::-1]

    def sequence_length(self, sequence: int) -> int:
        return self._last_run[sequence].end

    def sequence(self, sequence: int) -> TokenArray:
        """Return the tokens of a sequence, [length], joined from its path."""
        return np.concatenate([self.nodes[n].tokens for n in self.path(sequence)])

    def token_indices(self, sequence: int) -> NDArray[np.int64]:
        """Return the tree index of each token of a sequence, [length]."""
        nodes = (self.nodes[n] for n in self.path(sequence))
        return np.concatenate(
            [np.arange(n.first_token, n.first_token + n.num_tokens) for n in nodes]
        )


def _as_tokens(sequence: TokenSequence, index: int) -> TokenArray:
    """Copy and check sequence ``index`` of a batch. Raises as ``from_sequences``."""
    array = np.asarray(sequence)
    if array.size == 0:
        raise ValueError(
            f"sequence {index} is empty; a sequence needs at least one token: "
            "drop it before building the tree"
        )
    if array.ndim != 1:
        raise ValueError(
            f"sequence {index} has shape {array.shape}; expected 1-D token ids"
        )
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"sequence {index} has dtype {array.dtype}; expected integer token ids"
        )
    tokens = array.astype(np.int64)  # always a copy: the caller's buffer may change
    if tokens.min() < 0:
        raise ValueError(
            f"sequence {index} holds token id {tokens.min()}; ids must be >= 0"
        )
    return tokens


def common_prefix(a: NDArray[np.integer], b: NDArray[np.integer]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    n = min(len(a), len(b))
    # Most comparisons differ at once or not at all: look at one token first.
    if n == 0 or a[0] != b[0]:
        return 0
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


_Count = TypeVar("_Count", int, NDArray[np.int64])


def attended_pairs(start: _Count, end: _Count) -> _Count:
    """Return the (query, key) pairs of the tokens at depth [start, end).

    The token at depth d attends to its path and itself, d + 1 keys.
    """
    return (end * (end + 1) - start * (start + 1)) // 2
