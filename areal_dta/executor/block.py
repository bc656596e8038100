"""One block: one call of the model on some segments behind their path.

Also the *pace*: when the model may be called. A traversal asks its pace before each
forward and has it run each backward. `Pace` itself is the default: parameters are
resident, so the model may be called at any time. A model whose parameters are gathered
around every call (sharded over ranks) needs all ranks to call it equally often and in
the same order; its pace lives with the code that shards it.
"""

# S = block tokens, K = key/value heads, H = head dim

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.attention import (
    BlockAttention,
    LayerAttention,
    active_block,
    window_start,
)
from areal_dta.executor.kernels import Mask
from areal_dta.executor.kernels.flash_cuda import call_arrays
from areal_dta.executor.kv_cache import PathCache
from areal_dta.executor.last_layer import MAX_SHARE, LastLayer
from areal_dta.executor.layout.block_layout import BlockLayout, TreeTokens, lay_out
from areal_dta.executor.layout.upload import upload
from areal_dta.executor.memory.recompute import PartRecompute
from areal_dta.executor.model_refusals import (
    REMEDY,
    UnsupportedModelError,
    model_inputs,
)
from areal_dta.executor.outputs import OutputHead
from areal_dta.executor.states.protocol import (
    BlockStates,
    StatefulLayer,
    StateKey,
    running,
)
from areal_dta.schedule import NeededOutputs, Schedule, cut_tree
from areal_dta.tree import PrefixTree

IdleCall = Callable[[], Sequence[Tensor]]
"""Calls the model on one placeholder token; returns outputs with a graph. A rank does
so where other ranks have a block and it has none."""


class Pace:
    """When the model may be called: at any time, unless a subclass knows better."""

    calls_when_empty = False
    """Whether the model may be called although there is nothing to compute."""
    waits_for_others = False
    """Whether a block's measured time includes waiting for other ranks."""

    def traversal(
        self, schedule: Schedule, idle_call: IdleCall
    ) -> AbstractContextManager[None]:
        """Context manager for all steps of a traversal."""
        return nullcontext()

    def forward(self) -> AbstractContextManager[None]:
        """Context manager for each forward: one per step that computes something."""
        return nullcontext()

    def backward(
        self,
        roots: Sequence[Tensor],
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Take ``roots`` (possibly none) backward: once per exit when training.

        Args:
            inputs: leaves that get gradients; None: all, the parameters among them.
        """
        if roots:
            torch.autograd.backward(roots, grads, inputs=inputs)

    def together(self) -> AbstractContextManager[None]:
        """Context manager for calls of the model that every rank makes alike."""
        return nullcontext()


class BlockWatch(Protocol):
    """What looks on while blocks run."""

    inputs: list[Tensor] | None
    """Leaves that get gradients; None: all, the parameters among them."""

    def block(self, token_S: Tensor) -> AbstractContextManager[None]:
        """Context manager for the model's run on these tree tokens."""
        ...


@dataclass(slots=True)
class BlockOutput:
    """What a run leaves; part of its autograd graph if it has one."""

    layout: BlockLayout
    arrays: Mapping[Any, Tensor]
    """`block_arrays` on the device."""
    outputs: list[Tensor]
    """One per channel of the output head, with an entry per edge or per row."""
    keys: list[Tensor]
    """Keys [1, K, S, H] per layer that attends; empty unless kept."""
    values: list[Tensor]
    entering: Mapping[StateKey, Tensor]
    """States that entered: leaves."""
    leaving: Mapping[StateKey, Tensor]
    """States that leave [X, ...], one per exit of the block."""
    router_logits: list[Tensor] = field(default_factory=list)
    """[S, E] per layer with experts; only with a router's auxiliary loss."""


def block_arrays(
    layout: BlockLayout,
    tree: TreeTokens,
    path_tokens: int,
    layers: Mapping[int, LayerAttention],
    stateful: Sequence[StatefulLayer] = (),
) -> dict[Hashable, np.ndarray]:
    """Return all that a run of a block behind its path reads on the device, by name.

    Names of kernels' arrays are (``block`` or ``path``, number of keys, name).
    """
    arrays: dict[Hashable, np.ndarray] = {}
    arrays.update(layout.arrays(tree).items())
    shape = layout.shape
    size = shape.num_tokens
    arrays["block", size, "last"] = shape.last_S
    starts = {
        window_start(path_tokens, layout.depths, layer.window)
        for layer in layers.values()
    }
    for num_path in {path_tokens, *(path_tokens - start for start in starts)}:
        num_keys = size + num_path if shape.is_chain else size
        found = [("block", call_arrays(shape, size, num_keys))]
        if num_path and not shape.is_chain:
            found.append(("path", call_arrays(None, size, num_path)))
        for role, of_role in found:
            arrays.update({(role, *key): array for key, array in of_role.items()})
    if layout.runs is not None:
        widths = {width for layer in stateful for width in layer.widths.values()}
        with_levels = any(layer.scans_runs for layer in stateful)
        for key, array in layout.runs.arrays(widths, with_levels).items():
            arrays["state", *key] = array
    return arrays


class BlockRunner:
    """Calls a model on blocks."""

    def __init__(
        self,
        model: PreTrainedModel,
        head: OutputHead,
        path: PathCache,
        kernel: str,
        layers: Mapping[int, LayerAttention],
        watch: BlockWatch | None = None,
        last_layer: LastLayer | None = None,
        stateful: Sequence[StatefulLayer] = (),
        recompute: PartRecompute | None = None,
    ) -> None:
        self._model, self._head, self._path = model, head, path
        self._recompute = recompute
        self._kernel, self._layers, self._stateful = kernel, layers, stateful
        self._watch, self._last_layer = watch, last_layer

    def run(
        self,
        path_tokens: int,
        layout: BlockLayout,
        arrays: Mapping[Any, Tensor],
        keep_kv: bool,
        entering: Mapping[StateKey, Tensor] | None = None,
        keeps_part: bool = False,
    ) -> BlockOutput:
        """Call the model on a block behind the path that the cache holds.

        Args:
            arrays: `block_arrays` on the device.
            entering: states at the end of the path; None at the top of a tree.
            keeps_part: leave MLPs and norms out of its graph.

        Raises:
            UnsupportedModelError: a layer asks for something a tree cannot give.
        """

        def of_role(role: str) -> dict[Any, Tensor]:
            return {key[1:]: x for key, x in arrays.items() if role == key[0]}

        block = BlockAttention(
            path=self._path,
            path_tokens=path_tokens,
            depth_S=arrays["depth"],
            depths=layout.depths,
            mask=Mask(layout.shape, arrays=of_role("block")),
            path_mask=Mask(arrays=of_role("path")),
            kernel_name=self._kernel,
            keep_kv=keep_kv,
            layers=self._layers,
        )
        states = None
        if layout.runs is not None:
            states = BlockStates(
                layout.runs, of_role("state"), self._stateful, entering or {}
            )

        # Rows of the last layer. Who looks on sees all tokens in all layers.
        num_rows = len(layout.row_R)
        is_worth_it = max(num_rows, 1) <= MAX_SHARE * layout.shape.num_tokens
        last_layer = self._last_layer if is_worth_it and not self._watch else None
        # A block may be there for its keys and values alone: run one row, use none.
        row_R = arrays["row"] if num_rows else block.depth_S.new_zeros(1)

        def call(**options: Any) -> Tensor:
            """Return the model's logits, [1, ...]; of several calls the last counts."""
            block.restart()
            model: Any = self._model
            rows = last_layer.at_rows(row_R) if last_layer else nullcontext()
            with (
                rows as block.needed_rows,
                active_block(block, len(self._path.layers)),
                _running(states),
            ):
                if last_layer and "logits_to_keep" in options:
                    options["logits_to_keep"] = 0  # all that there is: the rows
                output = model(
                    **model_inputs(model, arrays["input"], block.depth_S), **options
                )
            logits: Tensor = output.logits
            return logits

        watch = self._watch
        part = self._recompute.active() if keeps_part and self._recompute else None
        with (
            watch.block(arrays["token"]) if watch is not None else nullcontext(),
            part or nullcontext(),
        ):
            outputs = self._head.outputs(call, layout, arrays)
        layers = self._path.layers if keep_kv else []
        return BlockOutput(
            layout=layout,
            arrays=arrays,
            outputs=outputs,
            keys=[block.keys[i] for i in layers],
            values=[block.values[i] for i in layers],
            entering=entering or {},
            leaving=states.leaving if states is not None else {},
        )


@contextmanager
def _running(states: BlockStates | None) -> Iterator[None]:
    """Context manager for one call of a model that may have states.

    Raises:
        UnsupportedModelError: a layer did not ask for each of its states once.
    """
    if states is None:
        yield
        return
    states.restart()
    with running(states):
        yield
    if (problem := states.wrong_calls()) is not None:
        raise UnsupportedModelError(
            f"{problem}: the layer mixes tokens in a way that a prefix tree does not "
            f"know; {REMEDY}"
        )


def idle_outputs(
    model: PreTrainedModel,
    head: OutputHead,
    kernel: str,
    layers: Mapping[int, LayerAttention],
    stateful: Sequence[StatefulLayer] = (),
) -> list[Tensor]:
    """Call the model on one placeholder token, through the same head."""
    return _short_block(model, head, kernel, layers, stateful, [0, 0], None)


def probe_outputs(
    model: PreTrainedModel,
    head: OutputHead,
    kernel: str,
    layers: Mapping[int, LayerAttention],
    stateful: Sequence[StatefulLayer],
    last_layer: LastLayer | None,
) -> list[Tensor]:
    """Return three outputs of a block of 16 tokens, the last layer as given."""
    num_tokens = 16
    vocab_size = model.config.get_text_config().vocab_size
    tokens = [(7 * i + 1) % vocab_size for i in range(num_tokens)]
    at = [2, 9, 13]
    return _short_block(model, head, kernel, layers, stateful, tokens, at, last_layer)


def _short_block(
    model: PreTrainedModel,
    head: OutputHead,
    kernel: str,
    layers: Mapping[int, LayerAttention],
    stateful: Sequence[StatefulLayer],
    sequence: list[int],
    positions: list[int] | None,
    last_layer: LastLayer | None = None,
) -> list[Tensor]:
    """Run one sequence as one block; return its outputs, all or at some positions."""
    tree = PrefixTree.from_sequences([sequence])
    needed = None
    if positions is not None:
        is_value = not head.channels[0].on_edges
        mask = np.zeros(len(sequence) - (not is_value), bool)
        mask[positions] = True
        at = NeededOutputs.values_at if is_value else NeededOutputs.logprobs_at
        needed = at(tree, [mask])
    cut = cut_tree(tree, len(sequence), needed)
    tokens = TreeTokens.of(tree, cut)
    exits: list[int] | None = [] if stateful else None
    layout = lay_out(tokens, cut.fragments[0].segments, exits)
    device = next(model.parameters()).device
    path = PathCache(layers, 0, with_grad=False)
    runner = BlockRunner(model, head, path, kernel, layers, None, last_layer, stateful)
    arrays = upload(block_arrays(layout, tokens, 0, layers, stateful), device)
    return runner.run(0, layout, arrays, keep_kv=False).outputs
