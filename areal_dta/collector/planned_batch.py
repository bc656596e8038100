"""A batch with its plan: what ``prepare_batch`` answers with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from areal_dta.collector.collector import Leaves, leaves_of
from areal_dta.collector.planner import BatchPlan, BatchPlanner
from areal_dta.collector.remote_tensors import fetch, forget
from areal_dta.collector.validate_trajectory import read_group

Item = dict[str, Any]
PLANNED_KEYS = ("input_ids", "attention_mask", "loss_mask")


class PlannedBatch(list[Item]):
    """AReaL's list of items; and its plans, each made once, when first asked for."""

    def __init__(self, items: Iterable[Item], leaves: Leaves, step: int = 0) -> None:
        super().__init__(items)
        self.leaves = leaves
        self.step = step
        self.num_minibatches = 1
        """That the actor will train it in; plans for forward passes follow."""
        self.wait: Callable[[], None] | None = None
        """Until it has been planned, where that is done by another thread."""
        self._plans: dict[tuple[int, int, int], BatchPlan] = {}

    def plan(
        self, planner: BatchPlanner, num_ranks: int, num_minibatches: int
    ) -> BatchPlan:
        if self.wait is not None:
            wait, self.wait = self.wait, None
            wait()
        return self.plan_here(planner, num_ranks, num_minibatches)

    def plan_here(
        self, planner: BatchPlanner, num_ranks: int, num_minibatches: int
    ) -> BatchPlan:
        """In this thread."""
        key = id(planner), num_ranks, num_minibatches
        if key not in self._plans:
            self._plans[key] = planner.plan(
                self.leaves, num_ranks, num_minibatches, self.step
            )
        return self._plans[key]

    def with_items(self, items: Sequence[Item]) -> PlannedBatch:
        """The same sequences with more known of them: the plans stay."""
        assert len(items) == len(self)
        batch = PlannedBatch(items, self.leaves, self.step)
        batch.num_minibatches = self.num_minibatches
        batch.wait, batch._plans = self.wait, self._plans
        return batch

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.leaves.order.length_N.max(initial=0))


def planned(items: Sequence[Item]) -> PlannedBatch:
    """A batch that did not come from ``prepare_batch``: its token ids are fetched.

    Raises:
        Rejected: an item cannot be trained on.
    """
    if isinstance(items, PlannedBatch):
        return items
    groups = [read_group(item, None) for item in fetch(items, PLANNED_KEYS)]
    forget(items, PLANNED_KEYS)
    return PlannedBatch(items, leaves_of(groups))
