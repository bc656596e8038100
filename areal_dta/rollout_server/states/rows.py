"""States of the rows that decode, from step to step."""

# R = rows

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from areal_dta.rollout_server.packed_attention import Piece
from areal_dta.rollout_server.prefix_cache import Node
from areal_dta.rollout_server.states.layers import carrying, state_layers
from areal_dta.rollout_server.states.step import Key, StepStates


class RowStates:
    """Parts [R, ...] of each layer's state; nothing for a model of attention alone.

    Raises:
        UnsupportedModelError: a layer carries a state that cannot be kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = state_layers(model)
        self._parts: dict[Key, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts.values())

    def enter(
        self, num_decoding: int, joining: Sequence[Node], pieces: Sequence[Piece]
    ) -> StepStates:
        """Return what layers need to know in a step."""
        return StepStates(self._parts, num_decoding, joining, pieces)

    def carried(self, step: StepStates) -> AbstractContextManager[None]:
        """Context manager for the call of the model."""
        return carrying(self.layers, step)

    def leave(self, step: StepStates) -> None:
        """Make what left a step that has succeeded the new states."""
        step.keep_pieces()
        self._parts = step.leaving_rows

    def reorder(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self._parts = {key: part[rows] for key, part in self._parts.items()}

    def clear(self) -> None:
        """Forget all rows, and free the memory."""
        self._parts = {}
