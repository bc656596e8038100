"""Seconds of each block of a traversal, which feed the cost model.

A block with a graph is timed over its forward (at enter) and its backward (at exit),
including the loss and the moves of keys and values: that is what it costs. On a GPU,
events are recorded and read when the traversal is over, so that nothing waits in
between. Held by tests/executor/test_telemetry.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
