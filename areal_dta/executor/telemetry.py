"""What a traversal measures: seconds per block, and tokens per expert.

`BlockTimer` feeds the cost model. A block with a graph is timed over its forward (at
enter) and its backward (at exit), including the loss and the moves of keys and values:
that is what it costs. On a GPU, events are recorded and read when the traversal is
over, so that nothing waits in between. Held by tests/executor/test_telemetry.py.

`RouterLoad` counts the tokens of each expert of a mixture as separate sequences would:
a tree token stands for all sequences through it, so its choice of experts counts that
many times. AReaL's FSDP engine trains without a load-balancing loss, so these counts
are for reading only. Held by tests/executor/test_router_load.py.
"""

# S = block tokens, T = tree tokens, K = experts per token

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from areal_dta.schedule import BlockSample, Schedule, StepKind, step_features, step_kind
from areal_dta.tree import PrefixTree


class BlockTimer:
    """Times the steps of one traversal."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager for each step, in order."""
        if self._device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(torch.cuda.current_stream(self._device))
            yield
            end.record(torch.cuda.current_stream(self._device))
            self._events.append((start, end))
        else:
            begin = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - begin)

    def samples(self, tree: PrefixTree, schedule: Schedule) -> list[BlockSample]:
        """Return one sample per block, in the order of forwards; waits for a GPU."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += [a.elapsed_time(b) / 1e3 for a, b in self._events]
            self._events.clear()
        timed = list(zip(schedule.steps, self._seconds, strict=True))
        backward_of = {
            step.fragment: seconds
            for step, seconds in timed
            if step.kind is StepKind.EXIT and not step.computes
        }
        samples = []
        for step, seconds in timed:
            if step.computes:
                if step.kind is StepKind.ENTER and step.with_grad:
                    seconds += backward_of[step.fragment]
                features = step_features(tree, schedule, step)
                samples.append(BlockSample(features, seconds, step_kind(step)))
        return samples


class RouterLoad:
    """Counts of one traversal, by a hook on each router.

    Tokens that are not computed (no needed output depends on them) are not counted.

    Raises:
        ValueError: the model has no router that is known.
    """

    inputs: list[Tensor] | None = None

    def __init__(self, model: nn.Module, tree: PrefixTree) -> None:
        self._routers: list[Any] = [m for m in model.modules() if is_router(m)]
        if not self._routers:
            raise ValueError(
                f"router_load: {type(model).__name__} has no router with `num_experts` "
                "and `top_k`; expected a mixture-of-experts model of Transformers"
            )
        device = next(model.parameters()).device
        self._weight_T = torch.from_numpy(_sequences_through(tree)).to(device)
        self._is_counted_T = torch.zeros_like(self._weight_T, dtype=torch.bool)
        self._counts = [
            torch.zeros(router.num_experts, dtype=torch.int64, device=device)
            for router in self._routers
        ]

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """One count per expert, for each layer with experts, first to last."""
        return tuple(tuple(count.tolist()) for count in self._counts)

    @contextmanager
    def block(self, token_S: Tensor) -> Iterator[None]:
        """Context manager for the model's run on these tree tokens.

        Its last call counts; tokens that are computed again do not.
        """
        weight_S = self._weight_T[token_S] * ~self._is_counted_T[token_S]
        chosen: dict[int, Tensor] = {}

        def watch(index: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                chosen[index] = _choice(output)

            return hook

        handles = [
            r.register_forward_hook(watch(i)) for i, r in enumerate(self._routers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for index, choice_SK in chosen.items():
            weight_SK = weight_S[:, None].expand_as(choice_SK)
            self._counts[index].index_add_(0, choice_SK.flatten(), weight_SK.flatten())
        self._is_counted_T[token_S] = True


def is_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router") and all(
        isinstance(getattr(module, name, None), int)
        for name in ("num_experts", "top_k")
    )


def _choice(output: Any) -> Tensor:
    """Return the chosen experts [S, K]: a router's only integers."""
    parts = output if isinstance(output, tuple | list) else [output]
    for part in parts:
        if isinstance(part, Tensor) and part.dtype == torch.int64:
            return part
    kinds = [type(part).__name__ for part in parts]
    raise ValueError(f"router_load: a router returned {kinds} without its choice")


def _sequences_through(tree: PrefixTree) -> np.ndarray:
    """Return per tree token, depth first, the number of sequences through it."""
    through = [len(node.sequences) for node in tree.nodes]
    for node in reversed(tree.nodes):  # children before parents
        if node.parent >= 0:
            through[node.parent] += through[node.index]
    lengths = [node.num_tokens for node in tree.nodes]
    return np.repeat(np.array(through, np.int64), lengths)
