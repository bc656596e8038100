"""The collector: takes in accepted trajectories as they arrive, hands out batches.

Life of a result (the group of trajectories of one prompt): it is *offered* when it
reaches the controller, in a thread of the collector and before AReaL counts it. It
then *waits* in the forest until it is *taken* with a batch. What cannot be trained on
is rejected when it is offered (`rejections`). With a limit on staleness, results that
exceed it are rejected as well, or *evicted* while they wait; by default none is.

All methods are thread-safe. Results are known by the ``task_id`` of their rollout.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from areal.utils import logging
from numpy.typing import NDArray

from areal_dta.collector.rejections import REASONS, Rejected, RejectionWatch
from areal_dta.collector.validate_trajectory import Group, validate_trajectory
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
    """Index of the item in the batch and row in the item, per sequence."""
    order: LeafOrder
    num_outputs_N: NDArray[np.int64]
    """Number of outputs that the loss reads, per sequence."""
    stats: ForestStats
    """Statistics of the forest of this batch alone."""
    needed_outputs_N: tuple[NDArray[np.int32], ...]
    """Depths of the tokens whose output the loss reads, rising, per sequence."""
    tokens_N: tuple[NDArray[np.uint32], ...]
    """Token ids per sequence; views into the forest's memory."""
    reward: float | None = None
    """Mean over the sequences; None if it is not known."""

    @classmethod
    def from_forest(
        cls, forest: PrefixForest, group_ids: Sequence[int], reward: float | None = None
    ) -> BatchSequences:
        """Return the sequences of these groups; item i of the batch is the i-th."""
        owners, order = forest.order(group_ids)
        item_of = {group_id: i for i, group_id in enumerate(group_ids)}
        leaves = [forest.leaf(owner) for owner in owners]
        return cls(
            tuple((item_of[group_id], row) for group_id, row in owners),
            order,
            np.array([len(leaf.needed_outputs) for leaf in leaves], np.int64),
            forest.stats(owners, order),
            tuple(leaf.needed_outputs for leaf in leaves),
            tuple(leaf.tokens for leaf in leaves),
            reward,
        )


@dataclass(frozen=True, slots=True)
class _Waiting:
    num_sequences: int
    head_version: int | None
    is_in_forest: bool
    rewards: tuple[float, ...]
    source: Hashable


_TIMED: Final = ("check", "insert", "fetch", "plan", "meter", "wait")
_MAX_REMEMBERED: Final = 2**16
"""Maximum number of results that left whose task ids are known, to find duplicates."""


class Collector:
    """Results that wait to be trained on, as a prefix forest.

    Args:
        max_sequence_tokens: longest sequence that the trainers accept; None for no
            limit.
        max_staleness: maximum number of versions between the first token of a
            trajectory and the policy that is trained; None (the default, and what
            AReaL does) drops nothing for its age.
        max_tokens: maximum number of sequence tokens in the forest.
        vocab_size: size of the model's vocabulary; None if unknown.
        watch: says when too much is rejected; None: never.
        takes_images: whether the trainers take other inputs than text.
    """

    def __init__(
        self,
        max_sequence_tokens: int | None = None,
        max_staleness: int | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        vocab_size: int | None = None,
        watch: RejectionWatch | None = None,
        takes_images: bool = True,
    ) -> None:
        self.max_sequence_tokens = max_sequence_tokens
        self.max_staleness = max_staleness
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
        self.takes_images = takes_images
        self._watch = watch or RejectionWatch(1, 1.0, None)
        self._lock = threading.Lock()
        self._forest = PrefixForest()
        self._waiting: dict[int, _Waiting] = {}
        self._sources: set[Hashable] = set()
        self._left: dict[int, None] = {}  # task ids, oldest first
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def offer(
        self,
        task_id: int,
        item: Mapping[str, Any],
        version: int,
        source: Hashable = None,
    ) -> None:
        """Check a result and insert its sequences.

        Args:
            item: padded tensors [B, S] of the group, at hand.
            version: current version of the policy.
            source: identifies the tensors; None if nothing does.

        Raises:
            Rejected: the result cannot be trained on; counted and logged.
        """
        try:
            with self.timed("check", time.thread_time):
                group = self._check(item, version)
            with self.timed("insert", time.thread_time), self._lock:
                self._insert(task_id, group, source)
        except Rejected as rejected:
            self.reject(task_id, rejected.reason, str(rejected))
            raise

    def reject(self, task_id: int, reason: str, message: str) -> None:
        """Count a result that is not trained on; log the first of a kind per step."""
        with self._lock:
            self._counts[f"rejected/{reason}"] += 1
            is_first = self._watch.reject(reason, message)
        if is_first and reason != "filtered":  # that is the workflow's own decision
            logger.warning(
                f"result {task_id} rejected ({reason}): {message}. More of this kind "
                "are only counted in this step"
            )

    def why_stop(self) -> str | None:
        """Return a message if too little can be trained on to go on."""
        with self._lock:
            return self._watch.why_stop()

    @contextmanager
    def timed(
        self, name: str, clock: Callable[[], float] = time.perf_counter
    ) -> Iterator[None]:
        """Add the time spent inside to ``collector/{name}_seconds``."""
        started = clock()
        try:
            yield
        finally:
            self.add_seconds(name, clock() - started)

    def add_seconds(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] += seconds

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
                f"collector.max_staleness={self.max_staleness}"
            )

    def take(self, task_ids: Sequence[int]) -> BatchSequences | None:
        """Remove a batch and return its sequences, its items in this order.

        Returns None if some of the sequences were not in the forest.
        """
        with self._lock:
            waiting = [self._waiting.get(task_id) for task_id in task_ids]
            batch = None
            if all(w is not None and w.is_in_forest for w in waiting):
                rewards = [reward for w in waiting if w for reward in w.rewards]
                reward = sum(rewards) / len(rewards) if rewards else None
                batch = BatchSequences.from_forest(self._forest, task_ids, reward)
            for task_id in self._waiting.keys() & task_ids:
                self._remove(task_id)
            self._watch.start_step()
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

        ``check_seconds``, ``insert_seconds`` and ``plan_seconds`` are CPU time of the
        collector's own threads, ``share_of_step`` is their sum relative to
        ``step_seconds``; ``fetch_seconds`` is time that these threads wait for tensors;
        ``meter_seconds`` is time of the trainer's thread, and ``wait_seconds`` is time
        that it waits for the collector. ``dropped`` counts all results of this step
        that are not trained on, for whatever reason.
        """
        with self._lock:
            counts, seconds = self._counts, self._seconds
            self._counts, self._seconds = Counter(), defaultdict(float)
            total, num_trees = self._forest.total, len(self._forest.trees)
            num_waiting = len(self._waiting)
        own_seconds = seconds["check"] + seconds["insert"] + seconds["plan"]
        per_step = 1 / step_seconds if step_seconds > 0 else 0.0
        values: dict[str, float] = {
            "inserted": counts["inserted"],
            "evicted_stale": counts["evicted_stale"],
            "dropped": sum(counts[f"rejected/{r}"] for r in REASONS)
            + counts["evicted_stale"],
            **{f"{name}_seconds": seconds[name] for name in _TIMED},
            "share_of_step": own_seconds * per_step,
            "wait_share_of_step": seconds["wait"] * per_step,
            "waiting": num_waiting,
            "waiting_sequences": total.num_sequences,
            "waiting_sequence_tokens": total.num_sequence_tokens,
            "waiting_tree_tokens": total.num_tree_tokens,
            "waiting_trees": num_trees,
            **{
                f"rejected/{reason}": counts[f"rejected/{reason}"] for reason in REASONS
            },
        }
        return {f"collector/{name}": float(v) for name, v in values.items()}

    def _check(self, item: Mapping[str, Any], version: int) -> Group:
        group = validate_trajectory(
            item, self.max_sequence_tokens, self.vocab_size, version
        )
        if not group.has_loss:
            raise Rejected("no_loss", "no token of any row carries loss")
        if self._is_stale(group.head_version, version):
            raise Rejected(
                "stale",
                f"begun by version {group.head_version}, now {version}; "
                f"collector.max_staleness={self.max_staleness}",
            )
        return group

    def _is_stale(self, head_version: int | None, version: int) -> bool:
        if self.max_staleness is None or head_version is None:
            return False
        return version - head_version > self.max_staleness

    def _insert(self, task_id: int, group: Group, source: Hashable) -> None:
        if task_id in self._waiting or task_id in self._left:
            raise Rejected("duplicate", f"task {task_id} was taken in before")
        if source is not None and source in self._sources:
            raise Rejected("duplicate", "its tensors wait as another task's result")
        num_tokens = self._forest.total.num_sequence_tokens + group.num_tokens
        is_in_forest = num_tokens <= self.max_tokens
        if is_in_forest:
            group.insert_into(self._forest, task_id)
        self._waiting[task_id] = _Waiting(
            len(group.sequences),
            group.head_version,
            is_in_forest,
            group.rewards,
            source,
        )
        self._sources.add(source)
        self._counts["inserted"] += 1
        self._watch.accept()

    def _remove(self, task_id: int) -> None:
        waiting = self._waiting.pop(task_id)
        self._sources.discard(waiting.source)
        for row in range(waiting.num_sequences if waiting.is_in_forest else 0):
            self._forest.remove((task_id, row))
        self._left[task_id] = None
        if len(self._left) > _MAX_REMEMBERED:
            del self._left[next(iter(self._left))]
