"""The collector: takes in accepted trajectories as they arrive, hands out batches.

Life of a result (the group of trajectories of one prompt): it is *offered* when it
reaches the controller, in a thread of the collector and before AReaL counts it. It
then *waits* in the forest until it is *taken* with a batch, or *evicted* because it has
become too stale. What cannot be trained on is rejected when it is offered.

All methods are thread-safe. Results are known by the ``task_id`` of their rollout.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from areal.utils import logging
from numpy.typing import NDArray

from areal_dta.collector.validate_trajectory import (
    REASONS,
    Group,
    Rejected,
    validate_trajectory,
)
from areal_dta.tree.leaf_order import LeafOrder
from areal_dta.tree.prefix_forest import ForestStats, Owner, PrefixForest

logger = logging.getLogger("Collector")

DEFAULT_MAX_TOKENS = 2**28
"""Maximum number of sequence tokens in the forest: 1 GiB. Results beyond it wait
without being inserted; their token ids are fetched again when they are planned."""


@dataclass(frozen=True, slots=True)
class BatchSequences:
    """The sequences of a batch in depth-first order: all that planning needs."""

    owners: tuple[Owner, ...]
    """Per sequence (index of the item in the batch, row in the item)."""
    order: LeafOrder
    num_outputs_N: NDArray[np.int64]
    """Per sequence the number of outputs that the loss reads."""
    stats: ForestStats
    """Of the forest of this batch alone."""

    @classmethod
    def from_forest(
        cls, forest: PrefixForest, group_ids: Sequence[int]
    ) -> BatchSequences:
        """Return the sequences of these groups; item i of the batch is the i-th."""
        owners, order = forest.order(group_ids)
        item_of = {group_id: i for i, group_id in enumerate(group_ids)}
        return cls(
            tuple((item_of[group_id], row) for group_id, row in owners),
            order,
            np.array([forest.num_outputs(owner) for owner in owners], np.int64),
            forest.stats(owners, order),
        )


@dataclass(frozen=True, slots=True)
class _Waiting:
    num_sequences: int
    head_version: int | None
    is_in_forest: bool


class Collector:
    """Results that wait to be trained on, as a prefix forest.

    Args:
        max_sequence_tokens: longest sequence that the trainers accept; None for no
            limit.
        max_staleness: maximum number of versions between the first token of a
            trajectory and the policy that is trained; None for no limit.
        max_tokens: maximum number of sequence tokens in the forest.
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

    def offer(self, task_id: int, item: Mapping[str, Any], version: int) -> None:
        """Check a result and insert its sequences.

        Args:
            item: padded tensors [B, S] of the group, at hand.
            version: current version of the policy.

        Raises:
            Rejected: the result cannot be trained on; counted and logged.
        """
        try:
            with self.timed("insert", time.thread_time):
                group = validate_trajectory(item, self.max_sequence_tokens)
                if self._is_stale(group.head_version, version):
                    raise Rejected(
                        "stale",
                        f"begun by version {group.head_version}, now {version}; "
                        f"rollout.max_head_offpolicyness={self.max_staleness}",
                    )
                with self._lock:
                    self._insert(task_id, group)
        except Rejected as rejected:
            self.count_rejected(rejected.reason)
            logger.warning(f"result {task_id} rejected ({rejected.reason}): {rejected}")
            raise

    def count_rejected(self, reason: str) -> None:
        with self._lock:
            self._counts[f"rejected/{reason}"] += 1

    @contextmanager
    def timed(
        self, name: str, clock: Callable[[], float] = time.perf_counter
    ) -> Iterator[None]:
        """Add the time spent inside to ``collector/{name}_seconds``."""
        started = clock()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[name] += clock() - started

    def find_stale(self, version: int) -> list[int]:
        """Return the task ids of what is too old for a step of this version."""
        with self._lock:
            return [
                task_id
                for task_id, waiting in self._waiting.items()
                if self._is_stale(waiting.head_version, version)
            ]

    def evict(self, task_ids: Sequence[int]) -> None:
        """Drop results that became stale while they waited."""
        with self._lock:
            for task_id in task_ids:
                self._remove(task_id)
            self._counts["evicted_stale"] += len(task_ids)
        if task_ids:
            logger.warning(
                f"{len(task_ids)} results became stale while they waited: "
                f"rollout.max_head_offpolicyness={self.max_staleness}"
            )

    def take(self, task_ids: Sequence[int]) -> BatchSequences | None:
        """Remove a batch and return its sequences, its items in this order.

        Returns None if some of the sequences were not in the forest.
        """
        with self._lock:
            waiting = [self._waiting.get(task_id) for task_id in task_ids]
            are_known = all(w is not None and w.is_in_forest for w in waiting)
            forest = self._forest
            batch = BatchSequences.from_forest(forest, task_ids) if are_known else None
            for task_id in self._waiting.keys() & task_ids:
                self._remove(task_id)
        return batch

    @property
    def total(self) -> ForestStats:
        """Counts over all sequences that wait now."""
        with self._lock:
            return self._forest.total

    @property
    def waiting_task_ids(self) -> list[int]:
        with self._lock:
            return sorted(self._waiting)

    def take_metrics(self, step_seconds: float) -> dict[str, float]:
        """Return counts and seconds since the last call, and what waits now.

        ``insert_seconds`` and ``plan_seconds`` are CPU time of the collector's own
        thread, ``share_of_step`` is their sum relative to ``step_seconds``;
        ``fetch_seconds`` is time that this thread waits for tensors; ``wait_seconds``
        is time that the trainer waits for the collector.
        """
        with self._lock:
            counts, seconds = self._counts, self._seconds
            self._counts, self._seconds = Counter(), defaultdict(float)
            total, num_trees = self._forest.total, len(self._forest.trees)
            num_waiting = len(self._waiting)
        own_seconds = seconds["insert"] + seconds["plan"]
        per_step = 1 / step_seconds if step_seconds > 0 else 0.0
        values: dict[str, float] = {
            "inserted": counts["inserted"],
            "evicted_stale": counts["evicted_stale"],
            "insert_seconds": seconds["insert"],
            "fetch_seconds": seconds["fetch"],
            "plan_seconds": seconds["plan"],
            "wait_seconds": seconds["wait"],
            "share_of_step": own_seconds * per_step,
            "wait_share_of_step": seconds["wait"] * per_step,
            "waiting": num_waiting,
            "waiting_sequences": total.num_sequences,
            "waiting_sequence_tokens": total.num_sequence_tokens,
            "waiting_tree_tokens": total.num_tree_tokens,
            "waiting_trees": num_trees,
        }
        for reason in REASONS:
            values[f"rejected/{reason}"] = counts[f"rejected/{reason}"]
        return {f"collector/{name}": float(v) for name, v in values.items()}

    def _is_stale(self, head_version: int | None, version: int) -> bool:
        if self.max_staleness is None or head_version is None:
            return False
        return version - head_version > self.max_staleness

    def _insert(self, task_id: int, group: Group) -> None:
        if task_id in self._waiting:
            self._remove(task_id)  # the task was run again
        num_tokens = self._forest.total.num_sequence_tokens + group.num_tokens
        is_in_forest = num_tokens <= self.max_tokens
        if is_in_forest:
            group.insert_into(self._forest, task_id)
        self._waiting[task_id] = _Waiting(
            len(group.sequences), group.head_version, is_in_forest
        )
        self._counts["inserted"] += 1

    def _remove(self, task_id: int) -> None:
        waiting = self._waiting.pop(task_id)
        for row in range(waiting.num_sequences if waiting.is_in_forest else 0):
            self._forest.remove((task_id, row))
