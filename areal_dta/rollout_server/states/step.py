"""States of one step: those that enter rows and pieces of prompts, and leave them.

A step's tokens are the newest token of each row, then pieces of prompts. Attention
finds a token's past by its keys; a layer with a state continues from what the token
before it left. Each row and each prompt has a state of its own, of which a layer may
have several parts (the inputs that its convolution still needs, a matrix per head).

Nothing is changed in place: what leaves becomes the new state only once the step has
succeeded (`leaving_rows`, `keep_pieces`).
"""

# R = rows, S = tokens of a piece

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from areal_dta.rollout_server.packed_attention import Piece
from areal_dta.rollout_server.prefix_cache import Node

Key = tuple[int, str]
"""A layer's place among those with a state, and a part of its state."""

Run = Callable[[slice, Tensor, bool], tuple[Tensor, Tensor]]
"""(tokens of the step, entering states, whether they are rows) -> output of these
tokens, leaving states. Rows are a batch of one token each; a piece is a batch of 1."""


class StepStates:
    """What layers with a state need to know in one step.

    Args:
        rows: parts of the states of rows that decode already, [R, ...].
        joining: the prompts of the rows that come after them.
        pieces: of prompts; a prompt has one at most.
    """

    def __init__(
        self,
        rows: Mapping[Key, Tensor],
        num_decoding: int,
        joining: Sequence[Node],
        pieces: Sequence[Piece],
    ) -> None:
        self._rows, self._num_decoding = rows, num_decoding
        self._joining, self._pieces = joining, pieces
        self.leaving_rows: dict[Key, Tensor] = {}
        self._leaving: list[tuple[Node, Key, Tensor]] = []
        self.num_calls: dict[Key, int] = {}

    def run(self, key: Key, zero: Tensor, run: Run, dim: int) -> Tensor:
        """Run one part of a layer on all tokens, each behind its own state.

        Args:
            zero: the state before the first token, [1, ...].
            dim: of the outputs that is tokens, for pieces.

        Returns:
            The outputs, rows first.
        """
        self.num_calls[key] = self.num_calls.get(key, 0) + 1
        # Pieces first: a row may join behind a prompt that is completed in this step.
        now: dict[int, Tensor] = {}
        outputs = []
        for piece in self._pieces:
            entering = self._of_node(piece.node, key, zero) if piece.start else zero
            where = slice(piece.first, piece.last)
            output, now[id(piece.node)] = run(where, entering, False)
            self._leaving.append((piece.node, key, now[id(piece.node)]))
            outputs.append(output)
        num_rows = self._num_decoding + len(self._joining)
        if num_rows:
            parts = [self._rows[key]] if self._num_decoding else []
            for node in self._joining:
                found = now.get(id(node))
                parts.append(self._of_node(node, key, zero) if found is None else found)
            output, left = run(slice(0, num_rows), torch.cat(parts), True)
            self.leaving_rows[key] = left
            outputs.insert(0, output)
        return torch.cat(outputs, dim)

    def keep_pieces(self) -> None:
        """Make what left the pieces the states of their prompts."""
        for node, key, state in self._leaving:
            node.states[key] = state

    def _of_node(self, node: Node, key: Key, zero: Tensor) -> Tensor:
        # Only a prompt of one token has nothing before its row's first one.
        return node.states[key] if node.num_tokens else zero
