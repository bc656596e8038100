"""Which outputs of a tree are read, and so which tokens have to be computed.

A token is computed iff it is, or is an ancestor of, a position that an output is read
from. In agentic RL 0.2-2 % of the tokens carry loss: the vocabulary projection of the
others, and all tokens below the last one that is read, cost nothing.
"""

# T = tree tokens in depth-first order

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_dta.tree import PrefixTree

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Reads:
    """Outputs that are read, and the tokens to compute for them."""

    edge_T: BoolArray
    """Whether the logprob of a token, given its path, is read by some sequence."""
    row_T: BoolArray
    """Whether an output is read at a token's position: every edge's parent is one."""
    computed: tuple[int, ...]
    """Per node: how many of its tokens have to be computed, from its top."""

    @property
    def num_computed_tokens(self) -> int:
        return sum(self.computed)

    @property
    def num_rows(self) -> int:
        return int(self.row_T.sum())

    @classmethod
    def all(cls, tree: PrefixTree) -> Reads:
        """Every logprob and entropy: only a leaf's last token predicts nothing."""
        edge_T = np.ones(tree.num_tree_tokens, dtype=bool)
        for node in tree.nodes:
            if node.parent < 0:
                edge_T[node.first_token] = False
        return cls._from_edges(tree, edge_T)

    @classmethod
    def at(cls, tree: PrefixTree, positions: Sequence[NDArray[np.generic]]) -> Reads:
        """Only some outputs of each sequence.

        Args:
            positions: per sequence [len-1], true where entry t (of token t+1) is read.

        Raises:
            ValueError: a mask is missing or has the wrong length; names the sequence.
        """
        if len(positions) != tree.num_sequences:
            raise ValueError(
                f"positions holds {len(positions)} masks for {tree.num_sequences} "
                "sequences; expected one each"
            )
        edge_T = np.zeros(tree.num_tree_tokens, dtype=bool)
        for i, mask in enumerate(positions):
            expected = tree.sequence_length(i) - 1
            if np.shape(mask) != (expected,):
                raise ValueError(
                    f"positions[{i}] has shape {np.shape(mask)}; expected "
                    f"({expected},): one entry a predicted token of sequence {i}"
                )
            edge_T[tree.token_indices(i)[1:]] |= np.asarray(mask, dtype=bool)
        return cls._from_edges(tree, edge_T)

    @classmethod
    def _from_edges(cls, tree: PrefixTree, edge_T: BoolArray) -> Reads:
        row_T = np.zeros(tree.num_tree_tokens, dtype=bool)
        row_T[:-1] = edge_T[1:]  # within a node the next token comes next
        for node in tree.nodes:
            last = node.first_token + node.num_tokens - 1
            row_T[last] = any(edge_T[tree.nodes[c].first_token] for c in node.children)
        return cls(edge_T, row_T, _computed(tree, row_T))


def _computed(tree: PrefixTree, row_T: BoolArray) -> tuple[int, ...]:
    computed = [0] * len(tree.nodes)
    for node in reversed(tree.nodes):  # children before parents
        if any(computed[c] for c in node.children):
            computed[node.index] = node.num_tokens
        else:
            end = node.first_token + node.num_tokens
            read = np.flatnonzero(row_T[node.first_token : end])
            computed[node.index] = int(read[-1]) + 1 if len(read) else 0
    return tuple(computed)
