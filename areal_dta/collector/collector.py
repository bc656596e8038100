"""The collector: takes in accepted trajectories as they arrive, hands out batches.

Life of a prompt's group: *offered* when its result reaches the controller (in a thread
of the collector, before AReaL counts it), then *waiting* in the forest; *taken* with a
batch, or *evicted* when it has become too stale. What cannot be trained on is rejected
when it is offered. All methods are thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from areal.utils import logging
from numpy.typing import NDArray

from areal_dta.collector.validate_trajectory import (
    REASONS,
    Group,
    Rejected,
    read_group,
)
from areal_dta.tree.leaf_order import LeafOrder
from areal_dta.tree.prefix_forest import ForestStats, Owner, PrefixForest

logger = logging.getLogger("Collector")

DEFAULT_MAX_TOKENS = 2**28
"""Sequence tokens held for planning: 1 GiB. Beyond them groups wait unplanned."""


@dataclass(frozen=True, slots=True)
class Leaves:
    """Sequences of a batch in depth-first order: all that planning needs."""

    owners: tuple[Owner, ...]
    """(item of the batch, row in it)."""
    order: LeafOrder
    num_outputs: NDArray[np.int64]
    """Outputs that are read of each."""
    stats: ForestStats
    """Of the batch by itself."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    num_sequences: int
    num_tokens: int
    head_version: int | None
    is_planned: bool


class Collector:
    """What waits to be trained on, as a prefix forest.

    Args:
        max_sequence_tokens: longest sequence that the trainers accept.
        max_staleness: versions that the first token of a trajectory may lie behind
            the policy that is trained; None for any.
        max_tokens: sequence tokens to hold at most.
    """

    def __init__(
        self,
        max_sequence_tokens: int | None = None,
        max_staleness: int | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> None:
        self.max_sequence_tokens = max_sequence_tokens
        self.max_staleness = max_staleness
        self.max_tokens = max_tokens
        self._lock = threading.Lock()
        self._forest = PrefixForest()
        self._waiting: dict[int, _Waiting] = {}
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def offer(self, number: int, item: Mapping[str, Any], version: int) -> None:
        """Take in the result of a task; its tensors are at hand.

        Args:
            version: of the policy now.

        Raises:
            Rejected: it is not to be trained on; counted and logged.
        """
        started = time.thread_time()
        try:
            group = read_group(item, self.max_sequence_tokens)
            if self._is_stale(group.head_version, version):
                raise Rejected(
                    "stale",
                    f"begun by version {group.head_version}, now {version}; "
                    f"rollout.max_head_offpolicyness={self.max_staleness}",
                )
            with self._lock:
                self._insert(number, group)
        except Rejected as rejected:
            self.count_rejected(rejected.reason)
            logger.warning(f"result {number} rejected ({rejected.reason}): {rejected}")
            raise
        finally:
            with self._lock:
                self._seconds["insert"] += time.thread_time() - started

    def count_rejected(self, reason: str) -> None:
        with self._lock:
            self._counts[f"rejected/{reason}"] += 1

    def add_seconds(self, name: str, seconds: float) -> None:
        """Of work for the collector that is done elsewhere, for the metrics."""
        with self._lock:
            self._seconds[name] += seconds

    def stale(self, version: int) -> list[int]:
        """Numbers of what is too old for a step of this version."""
        with self._lock:
            return [
                number
                for number, waiting in self._waiting.items()
                if self._is_stale(waiting.head_version, version)
            ]

    def evict(self, numbers: Sequence[int]) -> None:
        """Drop what became stale while it waited."""
        with self._lock:
            for number in numbers:
                self._remove(number)
            self._counts["evicted_stale"] += len(numbers)
        if numbers:
            logger.warning(
                f"{len(numbers)} results became stale while they waited: "
                f"rollout.max_head_offpolicyness={self.max_staleness}"
            )

    def take(self, numbers: Sequence[int]) -> Leaves | None:
        """Remove a batch, in this order of its items.

        Returns:
            Its sequences; None if some of them were not held.
        """
        with self._lock:
            known = all(
                number in self._waiting and self._waiting[number].is_planned
                for number in numbers
            )
            leaves = self._leaves(numbers) if known else None
            for number in numbers:
                if number in self._waiting:
                    self._remove(number)
        return leaves

    @property
    def total(self) -> ForestStats:
        """Of what waits now."""
        with self._lock:
            return self._forest.total

    @property
    def trees(self) -> dict[int, ForestStats]:
        """The same of each tree, by its first token."""
        with self._lock:
            return self._forest.trees

    @property
    def waiting(self) -> list[int]:
        """Numbers of the groups that wait."""
        with self._lock:
            return sorted(self._waiting)

    def take_metrics(self, step_seconds: float) -> dict[str, float]:
        """Counts and seconds since the last call, and what waits now.

        ``insert_seconds`` and ``plan_seconds`` are of the collector's own thread on a
        processor, ``share_of_step`` their sum; ``fetch_seconds`` it waits for the
        tensors that it looks at; ``wait_seconds`` the trainer waits for any of it.
        """
        with self._lock:
            counts, seconds = self._counts, self._seconds
            self._counts, self._seconds = Counter(), defaultdict(float)
            total, trees = self._forest.total, len(self._forest.trees)
            num_waiting = len(self._waiting)
        own = seconds["insert"] + seconds["plan"]
        share = 1 / step_seconds if step_seconds > 0 else 0.0
        values: dict[str, float] = {
            "inserted": counts["inserted"],
            "evicted_stale": counts["evicted_stale"],
            "insert_seconds": seconds["insert"],
            "fetch_seconds": seconds["fetch"],
            "plan_seconds": seconds["plan"],
            "wait_seconds": seconds["wait"],
            "share_of_step": own * share,
            "wait_share_of_step": seconds["wait"] * share,
            "waiting": num_waiting,
            "waiting_sequences": total.num_sequences,
            "waiting_sequence_tokens": total.sequence_tokens,
            "waiting_tree_tokens": total.tree_tokens,
            "waiting_trees": trees,
        }
        for reason in REASONS:
            values[f"rejected/{reason}"] = counts[f"rejected/{reason}"]
        return {f"collector/{name}": float(v) for name, v in values.items()}

    def _is_stale(self, head_version: int | None, version: int) -> bool:
        if self.max_staleness is None or head_version is None:
            return False
        return version - head_version > self.max_staleness

    def _insert(self, number: int, group: Group) -> None:
        if number in self._waiting:
            self._remove(number)  # a task that was run again
        held = self._forest.total.sequence_tokens
        is_planned = held + group.num_tokens <= self.max_tokens
        if not is_planned:
            self._counts["unplanned"] += 1
        for row, tokens in enumerate(group.sequences if is_planned else ()):
            self._forest.insert((number, row), tokens, group.needed_outputs[row])
        self._waiting[number] = _Waiting(
            len(group.sequences), group.num_tokens, group.head_version, is_planned
        )
        self._counts["inserted"] += 1

    def _remove(self, number: int) -> None:
        waiting = self._waiting.pop(number)
        for row in range(waiting.num_sequences if waiting.is_planned else 0):
            self._forest.remove((number, row))

    def _leaves(self, numbers: Sequence[int]) -> Leaves:
        owners, order = self._forest.order(numbers)
        item_of = {number: i for i, number in enumerate(numbers)}
        return Leaves(
            tuple((item_of[number], row) for number, row in owners),
            order,
            np.array([self._forest.num_outputs(o) for o in owners], np.int64),
            self._forest.stats(owners, order),
        )


def leaves_of(groups: Sequence[Group]) -> Leaves:
    """The same of a batch that did not come through a collector."""
    forest = PrefixForest()
    for item, group in enumerate(groups):
        for row, tokens in enumerate(group.sequences):
            forest.insert((item, row), tokens, group.needed_outputs[row])
    owners, order = forest.order(range(len(groups)))
    num_outputs = np.array([forest.num_outputs(o) for o in owners], np.int64)
    return Leaves(tuple(owners), order, num_outputs, forest.total)
