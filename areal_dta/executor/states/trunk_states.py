"""States at the ends of open fragments' trunk segments, where child fragments begin.

They are kept detached, with accumulators of their gradients in fp32 (fp64 for fp64).
Every child reads its state as a leaf of its own, which it gives back with a gradient at
its exit. A state goes when its last child has left; its gradient stays, and is a root
of the owner's backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from areal_dta.executor.kernels import accumulation_dtype
from areal_dta.executor.states.protocol import StateKey


class TrunkStates:
    """States that left a block, by the segment at whose end they did.

    Args:
        leaving: per state [X, ...], one per segment of ``segments``.
        children: the segment that each child fragment continues.
    """

    def __init__(
        self,
        leaving: Mapping[StateKey, Tensor],
        segments: Sequence[int],
        children: Sequence[int],
    ) -> None:
        self._at = {segment: i for i, segment in enumerate(segments)}
        self._states = {
            segment: {key: x.detach()[i : i + 1] for key, x in leaving.items()}
            for segment, i in self._at.items()
        }
        self._num_children = Counter(children)
        self.grads: dict[StateKey, Tensor] = {}
        """Accumulators [X, ...], made when the first gradient comes."""

    def enter(self, segment: int, with_grad: bool) -> dict[StateKey, Tensor]:
        """Return the states at the end of a segment as leaves."""
        return {
            key: x.detach().requires_grad_(with_grad)
            for key, x in self._states[segment].items()
        }

    def leave(self, segment: int, entered: Mapping[StateKey, Tensor]) -> None:
        """Take the gradients of a child's leaves; drop a state after its last child."""
        for key, leaf in entered.items():
            if leaf.grad is None:
                continue
            if key not in self.grads:
                shape = len(self._at), *leaf.shape[1:]
                acc = accumulation_dtype(leaf.dtype)
                self.grads[key] = leaf.new_zeros(shape, dtype=acc)
            self.grads[key][self._at[segment]] += leaf.grad[0]
            leaf.grad = None
        self._num_children[segment] -= 1
        if not self._num_children[segment]:
            del self._states[segment]
