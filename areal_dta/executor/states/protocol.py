"""Layers that carry a state from token to token, in a block of several branches.

What a layer with a state is to the executor (`StatefulLayer`): which convolutions it
runs over tokens, whether it runs a scan, and which of its attributes lead there. While
trees run, those attributes call the block at hand (`BlockStates`), which hands every
run the state of the run above it and gives each layer's own function the rest.

A state enters a block as a leaf, and leaves it where child fragments begin, as part of
the block's graph (`trunk_states.py` holds it in between). At the top of a tree it is 0.
"""

# S = block tokens, D = channels, W = convolution width, X = states that leave a block

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from areal_dta.executor.states.run_tree import ChunkTree, RunLevels, RunTree

StateKey = tuple[int, str]
"""Layer index and name of one of its states."""
Scan = Callable[[ChunkTree, Tensor | None], tuple[Tensor, list[Tensor]]]
"""(chunks, entering state or None) -> outputs [S, ...], and per depth of chunks the
states that they leave."""
RunScan = Callable[[RunLevels, Tensor | None], tuple[Tensor, list[Tensor]]]
"""The same for whole runs."""

SCAN = "scan"


@dataclass(frozen=True, slots=True)
class StatefulLayer:
    """A module that carries states, as the executor sees it."""

    layer_idx: int
    module: nn.Module
    widths: Mapping[str, int]
    """Width of each convolution over tokens, by a name of its state."""
    has_scan: bool
    attributes: Sequence[tuple[nn.Module, str, Any]]
    """(owner, name, value): set while trees run. Values call `active_states()`."""
    state_elements: int = 0
    """Elements of the scan's state."""
    tail_elements: int = 0
    """Elements of all tails of the convolutions."""
    scans_runs: bool = False
    """Whether its scan may ask for whole runs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the states."""
        return (*self.widths, *([SCAN] if self.has_scan else []))


@dataclass(slots=True)
class BlockStates:
    """States of one block: what enters, and what its layers leave."""

    runs: RunTree
    arrays: Mapping[Any, Tensor]
    """`RunTree.arrays` on the device."""
    layers: Sequence[StatefulLayer]
    entering: Mapping[StateKey, Tensor]
    """Leaves; empty at the top of a tree."""
    leaving: dict[StateKey, Tensor] = field(default_factory=dict)
    """Per state [X, ...], part of the graph; one per exit."""
    chunks: ChunkTree = field(init=False)
    levels: RunLevels | None = field(init=False)
    """Whole runs; None where no layer asks for them."""
    _calls: Counter[StateKey] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chunks = self.runs.on_device(self.arrays)
        scans_runs = any(layer.scans_runs for layer in self.layers)
        levels = self.runs.levels_on_device(self.arrays) if scans_runs else None
        self.levels = levels

    def restart(self) -> None:
        """Forget a call of the model, to run the block once more."""
        self.leaving.clear()
        self._calls.clear()

    def wrong_calls(self) -> str | None:
        """Return the first layer that did not ask for each of its states once."""
        for layer in self.layers:
            for name in layer.names:
                if (num := self._calls[layer.layer_idx, name]) != 1:
                    kind = type(layer.module).__name__.removeprefix("FSDP")
                    return (
                        f"{kind} (layer {layer.layer_idx}) asked {num} times for its "
                        f"{name}; expected once"
                    )
        return None

    def convolve(
        self, key: StateKey, x: Tensor, width: int, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return a causal convolution over the paths of a block, [1, D, S].

        Args:
            x: [1, D, S].
            function: the model's own, of one sequence [1, D, n]; gives [1, D, n] or
                more, of which the first n count.
        """
        self._calls[key] += 1
        tail, num_tokens = width - 1, x.shape[2]
        self._check_tokens(key, num_tokens)
        before = self.entering.get(key)
        if before is None:
            before = x.new_zeros(1, x.shape[1], tail)
        # The inputs right before each run, put before it: [1, D, R (W - 1) + S].
        source = torch.cat([before.to(x.dtype), x], 2)
        if self.runs.is_chain:
            out = function(source)[..., tail : tail + num_tokens]
        else:
            read = self.arrays["tail", width, "read"]
            kept = self.arrays["tail", width, "kept"]
            out = function(source.index_select(2, read)).index_select(2, kept)
        left = self.arrays.get(("tail", width, "left"))
        if left is not None:
            tails = source.index_select(2, left)
            self.leaving[key] = tails[0].unflatten(1, (-1, tail)).transpose(0, 1)
        return out

    def scan(self, layer_idx: int, num_tokens: int, scan: Scan) -> Tensor:
        """Return the outputs of a scan over the paths of a block, [S, ...]."""
        return self._scan(layer_idx, num_tokens, scan, self.chunks)

    def scan_runs(self, layer_idx: int, num_tokens: int, scan: RunScan) -> Tensor:
        """Return the same of a scan over whole runs."""
        assert self.levels is not None
        return self._scan(layer_idx, num_tokens, scan, self.levels)

    def _scan(
        self, layer_idx: int, num_tokens: int, scan: Callable[..., Any], where: Any
    ) -> Tensor:
        key = layer_idx, SCAN
        self._calls[key] += 1
        self._check_tokens(key, num_tokens)
        out: Tensor
        out, states = scan(where, self.entering.get(key))
        if where.left is not None:
            self.leaving[key] = torch.cat(states).index_select(0, where.left)
        return out

    def _check_tokens(self, key: StateKey, num_tokens: int) -> None:
        if num_tokens != self.runs.num_tokens:
            raise ValueError(
                f"layer {key[0]} gives its {key[1]} {num_tokens} tokens; expected "
                f"{self.runs.num_tokens}, those of the block"
            )


_active: ContextVar[BlockStates | None] = ContextVar(
    "areal_dta_active_states", default=None
)


def active_states() -> BlockStates:
    """Return the states of the block that runs."""
    states = _active.get()
    if states is None:
        raise RuntimeError(
            "a layer with a state was called outside a block of a TreeExecutor: a "
            "layer that is checkpointed runs again in the backward; switch that off"
        )
    return states


@contextmanager
def running(states: BlockStates) -> Iterator[None]:
    """Context manager for one call of the model on a block."""
    token = _active.set(states)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def on_trees(layers: Sequence[StatefulLayer]) -> Iterator[None]:
    """Context manager in which layers with a state ask the active block for it."""
    before: list[tuple[nn.Module, str, Any]] = []
    missing = object()
    try:
        for layer in layers:
            for owner, name, value in layer.attributes:
                before.append((owner, name, vars(owner).get(name, missing)))
                setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
