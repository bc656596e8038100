"""When the model is called: at will, or in step with other ranks.

A traversal asks its *pace* before each forward and has it run each backward. Models
whose parameters come and go around every call (sharded over ranks, gathered by
collectives) need all ranks to call them the same number of times in the same order;
their pace lives with the code that shards them. Here is the pace of a model that is
simply there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from areal_dta.schedule import Schedule

IdleCall = Callable[[], Sequence[Tensor]]
"""Runs the model on one token that belongs to nothing; returns outputs with a graph."""


class Pace(Protocol):
    @property
    def calls_when_empty(self) -> bool:
        """Whether the model may be called although there is nothing to compute."""
        ...

    @property
    def waits_for_others(self) -> bool:
        """Whether a block's seconds hold those of other ranks."""
        ...

    def traversal(
        self, schedule: Schedule, idle_call: IdleCall
    ) -> AbstractContextManager[None]:
        """Around all steps of a traversal."""
        ...

    def forward(self) -> AbstractContextManager[None]:
        """Around each forward: one for each step that computes something."""
        ...

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Take ``roots`` (maybe none) backward: once an exit when training."""
        ...


class FreePace:
    """Calls the model at will."""

    calls_when_empty = False
    waits_for_others = False

    def traversal(
        self, schedule: Schedule, idle_call: IdleCall
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        if roots:
            torch.autograd.backward(roots, grads)
