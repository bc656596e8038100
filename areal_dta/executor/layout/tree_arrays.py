"""Index arrays of a traversal on its device: of blocks, paths, sequences, outputs.

On a GPU all of them are there before the first block, by one copy, so that the host
waits for nothing inside the traversal. On a CPU each is made when it is needed, so that
memory follows the path.

Invariants, and the tests that hold them (tests/executor):
  * both ways give the same bits: test_upload.py
  * one copy per tree, no synchronisation: test_cuda_calls.py
"""

# S = block tokens, T = tree tokens

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_dta.executor.attention import LayerAttention
from areal_dta.executor.block import block_arrays
from areal_dta.executor.kv_cache import Positions
from areal_dta.executor.layout.block_layout import (
    BlockLayout,
    TreeTokens,
    as_slice,
    exit_segments,
    lay_out,
    path_positions,
    trunk_positions,
)
from areal_dta.executor.layout.upload import upload, uploads_ahead
from areal_dta.executor.states.protocol import StatefulLayer
from areal_dta.schedule import Fragment, Schedule, Step, StepKind
from areal_dta.tree import PrefixTree

_Groups = Mapping[Hashable, Mapping[Any, np.ndarray]]


class TreeArrays:
    """Index arrays of one traversal.

    Args:
        masks: bool [T] per channel of the output head: which outputs are needed.
        stateful: the layers that carry a state.
    """

    def __init__(
        self,
        tree: PrefixTree,
        schedule: Schedule,
        layers: Mapping[int, LayerAttention],
        masks: Mapping[str, np.ndarray],
        device: torch.device,
        stateful: Sequence[StatefulLayer] = (),
    ) -> None:
        self._tree, self._schedule, self._cut = tree, schedule, schedule.cut
        self._layers, self._device, self._stateful = layers, device, stateful
        self._tokens = TreeTokens.of(tree, schedule.cut)
        self._layouts: dict[tuple[StepKind, int], BlockLayout] = {}
        self._slices: dict[Hashable, slice] = {}
        self._arrays: dict[Hashable, dict[Any, Tensor]] = {}
        self._is_ahead = uploads_ahead(device)
        self._upload(
            {"needed": masks, **(self._all_groups() if self._is_ahead else {})}
        )

    def needed(self, channel: str) -> Tensor:
        """Return which outputs of a channel are needed, bool [T]."""
        return self._arrays["needed"][channel]

    def token_indices(self, sequence: int) -> Tensor:
        """Return the tree tokens of a sequence, [len]."""
        if not self._is_ahead:
            return torch.from_numpy(self._tree.token_indices(sequence))
        return self._arrays["sequence"][sequence]

    def block(self, step: Step) -> tuple[BlockLayout, Mapping[Any, Tensor]]:
        """Return the layout of a step's block, once, and `block_arrays` of it."""
        key = step.kind, step.fragment
        if not self._is_ahead:
            self._upload({key: self._block_arrays(step)})
        return self._layouts.pop(key), self._arrays[key]

    def trunk(self, step: Step) -> Positions:
        """Return where the trunk lies in a step's block."""
        return self._positions((step.kind, step.fragment), "trunk")

    def path(self, fragment: Fragment) -> Positions:
        """Return where a fragment's path lies in the trunk of its parent."""
        if not self._is_ahead:
            self._upload(
                {"path": {fragment.attach: path_positions(self._cut, fragment)}}
            )
        return self._positions("path", fragment.attach)

    def drop(self, kind: StepKind, fragment: int) -> None:
        """Forget the arrays of a block that is done."""
        self._arrays.pop((kind, fragment))

    def _upload(self, groups: _Groups) -> None:
        """Put index arrays on the device, in one copy; contiguous ranges as slices."""
        arrays: dict[tuple[Hashable, Any], np.ndarray] = {}
        for group, of_group in groups.items():
            for name, array in of_group.items():
                is_range = name == "trunk" or group == "path"
                if is_range and (found := as_slice(array)) is not None:
                    self._slices[group, name] = found
                else:
                    arrays[group, name] = array
            self._arrays[group] = {}
        for (group, name), tensor in upload(arrays, self._device).items():
            self._arrays[group][name] = tensor

    def _all_groups(self) -> dict[Hashable, dict[Any, np.ndarray]]:
        """Return the index arrays of the whole traversal."""
        return {
            **{
                (step.kind, step.fragment): self._block_arrays(step)
                for step in self._schedule.steps
                if step.computes
            },
            "path": {
                f.attach: path_positions(self._cut, f)
                for f in self._cut.fragments
                if f.parent >= 0
            },
            "sequence": {
                s: self._tree.token_indices(s) for s in range(self._tree.num_sequences)
            },
        }

    def _block_arrays(self, step: Step) -> dict[Any, np.ndarray]:
        """Lay out the block of a step; return its arrays and where its trunk lies."""
        fragment = self._cut.fragments[step.fragment]
        exits = exit_segments(self._cut, fragment) if self._stateful else None
        layout = lay_out(self._tokens, step.computes, exits)
        self._layouts[step.kind, step.fragment] = layout
        arrays: dict[Any, np.ndarray] = block_arrays(
            layout, self._tokens, fragment.path_tokens, self._layers, self._stateful
        )
        if fragment.children:
            arrays["trunk"] = trunk_positions(self._cut, fragment, layout)
        return arrays

    def _positions(self, group: Hashable, name: Any) -> Positions:
        found = self._slices.get((group, name))
        return found if found is not None else self._arrays[group][name]
