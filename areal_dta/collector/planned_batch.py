"""The batch returned by `prepare_batch`, with its dispatch plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from areal_dta.collector.collector import BatchSequences
from areal_dta.collector.planner import BatchPlan, BatchPlanner
from areal_dta.collector.remote_tensors import fetch, forget
from areal_dta.collector.validate_trajectory import validate_trajectory
from areal_dta.engine.row_share import Item
from areal_dta.tree.prefix_forest import PrefixForest

PLANNED_KEYS = ("input_ids", "attention_mask", "loss_mask")


class PlannedBatch(list[Item]):
    """AReaL's list of items, and its plans: each is made when first asked for."""

    def __init__(
        self, items: Iterable[Item], sequences: BatchSequences, step: int = 0
    ) -> None:
        super().__init__(items)
        self.sequences = sequences
        self.step = step
        self.num_minibatches = 1
        """Minibatches of the actor's update. Forward passes are planned for the same
        number, so that they share its plan."""
        self.wait: Callable[[], Any] | None = None
        """Blocks until another thread has made the plan; None if none is at it."""
        self._plans: dict[tuple[int, int, int], BatchPlan] = {}

    def plan(
        self, planner: BatchPlanner, num_ranks: int, num_minibatches: int
    ) -> BatchPlan:
        """Return the plan, after waiting for the thread that makes it, if any."""
        if self.wait is not None:
            wait, self.wait = self.wait, None
            wait()
        return self.plan_now(planner, num_ranks, num_minibatches)

    def plan_now(
        self, planner: BatchPlanner, num_ranks: int, num_minibatches: int
    ) -> BatchPlan:
        """Return the plan, made in this thread if it is not known yet."""
        key = id(planner), num_ranks, num_minibatches
        if key not in self._plans:
            self._plans[key] = planner.plan(
                self.sequences, num_ranks, num_minibatches, self.step
            )
        return self._plans[key]

    def with_items(self, items: Sequence[Item]) -> PlannedBatch:
        """Return a batch of the same sequences, hence plans, with other tensors."""
        assert len(items) == len(self)
        batch = PlannedBatch(items, self.sequences, self.step)
        batch.num_minibatches = self.num_minibatches
        batch.wait, batch._plans = self.wait, self._plans
        return batch

    @property
    def width(self) -> int:
        """Number of tokens of the longest sequence."""
        return int(self.sequences.order.length_N.max(initial=0))


def to_planned_batch(items: Sequence[Item]) -> PlannedBatch:
    """Return items as a `PlannedBatch`, which they are if `prepare_batch` made them.

    For others the token ids are fetched.

    Raises:
        Rejected: an item cannot be trained on.
    """
    if isinstance(items, PlannedBatch):
        return items
    forest = PrefixForest()
    for i, item in enumerate(fetch(items, PLANNED_KEYS)):
        validate_trajectory(item, None).insert_into(forest, i)
    forget(items, PLANNED_KEYS)
    return PlannedBatch(items, BatchSequences.from_forest(forest, range(len(items))))
