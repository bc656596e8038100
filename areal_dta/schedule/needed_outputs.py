"""Which outputs of a tree are needed, and so which tokens have to be computed.

A token is computed iff an output is needed at it or at one of its descendants. In
agentic RL 0.2-2 % of the tokens carry loss: neither the vocabulary projection of the
others nor any token below the last needed output costs anything.

Invariant (tests/schedule/test_needed_outputs.py): computed are exactly the tokens at
which an output is needed, and their ancestors.
"""

# T = tree tokens in depth-first order

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from areal_dta.tree import PrefixTree

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NeededOutputs:
    """Outputs that the loss reads, and the tokens to compute for them."""

    edge_T: BoolArray
    """Whether some sequence needs the logprob of a token, given its path."""
    output_T: BoolArray
    """Whether an output is needed at a token: at least at the parent of every edge."""
    computed: tuple[int, ...]
    """Number of tokens to compute per node, counted from its top."""
    is_all: bool = False
    """Whether every output is needed."""

    @property
    def num_computed_tokens(self) -> int:
        return sum(self.computed)

    @property
    def num_outputs(self) -> int:
        return int(self.output_T.sum())

    @classmethod
    def all(cls, tree: PrefixTree) -> NeededOutputs:
        """Need every logprob and entropy: only a leaf's last token predicts nothing."""
        edge_T = np.ones(tree.num_tree_tokens, dtype=bool)
        for node in tree.nodes:
            if node.parent < 0:
                edge_T[node.first_token] = False
        return cls._from_edges(tree, edge_T, is_all=True)

    @classmethod
    def values_at(
        cls, tree: PrefixTree, positions: Sequence[NDArray[np.generic]] | None
    ) -> NeededOutputs:
        """Need no logprobs, but an output at tokens themselves: a critic's values.

        Args:
            positions: per sequence [len], true where the output is needed; None for
                everywhere.

        Raises:
            ValueError: a mask is missing or has the wrong length; names it.
        """
        output_T = np.full(tree.num_tree_tokens, positions is None)
        if positions is not None:
            for i, mask in _checked(tree, positions, 0):
                output_T[tree.token_indices(i)] |= mask
        edge_T = np.zeros_like(output_T)
        return cls(edge_T, output_T, _computed(tree, output_T), positions is None)

    @classmethod
    def logprobs_at(
        cls, tree: PrefixTree, positions: Sequence[NDArray[np.generic]]
    ) -> NeededOutputs:
        """Need some logprobs of each sequence.

        Args:
            positions: per sequence [len-1]; entry t is that of token t+1.

        Raises:
            ValueError: a mask is missing or has the wrong length; names it.
        """
        edge_T = np.zeros(tree.num_tree_tokens, dtype=bool)
        for i, mask in _checked(tree, positions, 1):
            edge_T[tree.token_indices(i)[1:]] |= mask
        return cls._from_edges(tree, edge_T, is_all=False)

    def with_all_tokens(self, tree: PrefixTree) -> NeededOutputs:
        """Compute every token, whether an output depends on it or not."""
        return replace(self, computed=tuple(node.num_tokens for node in tree.nodes))

    @classmethod
    def _from_edges(
        cls, tree: PrefixTree, edge_T: BoolArray, is_all: bool
    ) -> NeededOutputs:
        output_T = np.zeros(tree.num_tree_tokens, dtype=bool)
        output_T[:-1] = edge_T[1:]  # within a node the predicted token comes next
        for node in tree.nodes:
            last = node.first_token + node.num_tokens - 1
            output_T[last] = any(
                edge_T[tree.nodes[c].first_token] for c in node.children
            )
        return cls(edge_T, output_T, _computed(tree, output_T), is_all)


def _checked(
    tree: PrefixTree, positions: Sequence[NDArray[np.generic]], num_fewer: int
) -> Iterator[tuple[int, BoolArray]]:
    """Yield each sequence and its mask of [len - num_fewer]."""
    if len(positions) != tree.num_sequences:
        raise ValueError(
            f"positions holds {len(positions)} masks for {tree.num_sequences} "
            "sequences; expected one per sequence"
        )
    for i, mask in enumerate(positions):
        expected = tree.sequence_length(i) - num_fewer
        if np.shape(mask) != (expected,):
            raise ValueError(
                f"positions[{i}] has shape {np.shape(mask)}; expected "
                f"({expected},): one entry per output of sequence {i}"
            )
        yield i, np.asarray(mask, dtype=bool)


def _computed(tree: PrefixTree, output_T: BoolArray) -> tuple[int, ...]:
    """Return the tokens to compute per node: all above a computed child, else up to the
    last needed output."""
    computed = [0] * len(tree.nodes)
    for node in reversed(tree.nodes):  # children before parents
        if any(computed[c] for c in node.children):
            computed[node.index] = node.num_tokens
        else:
            end = node.first_token + node.num_tokens
            read = np.flatnonzero(output_T[node.first_token : end])
            computed[node.index] = int(read[-1]) + 1 if len(read) else 0
    return tuple(computed)
