"""Hook between AReaL's rollout controller and the collector: where results arrive.

A result is taken in when the controller has fetched it from its worker and before it
counts towards a batch, in a thread of the collector's own. For AReaL's staleness
control, a result that is rejected here is a rejected rollout. The prompt of a rollout
that failed or became stale is issued again (see `prompt_loader`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import Any

from areal.infra import RolloutController
from areal.utils import logging

from areal_dta.collector.collector import Collector
from areal_dta.collector.planned_batch import (
    PLANNED_KEYS,
    PlannedBatch,
    to_planned_batch,
)
from areal_dta.collector.planner import BatchPlan
from areal_dta.collector.prompt_loader import PromptLoader
from areal_dta.collector.remote_tensors import delete, fetch, forget
from areal_dta.collector.validate_trajectory import FETCHED_KEYS, Rejected
from areal_dta.engine.row_share import Item

logger = logging.getLogger("Collection")

_PLAN_TIMEOUT_SECONDS = 600.0
# The report fetches these again to measure the batch: they stay in the buffer.
_FETCHED_AGAIN = (*PLANNED_KEYS, "rewards")


class CollectorHook:
    """A collector at work on one rollout controller.

    Args:
        controller: must be initialized.
        prompts: told what became of each prompt; None if it did not issue them.
    """

    def __init__(
        self,
        controller: RolloutController,
        collector: Collector,
        prompts: PromptLoader | None = None,
    ) -> None:
        self.collector = collector
        self._controller, self._prompts = controller, prompts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="collector")
        self._prompt_of: dict[int, Any] = {}  # by task_id
        self._task_id_of: dict[int, int] = {}  # by id() of an item's dict
        self.step = 0
        """Step of the next batch."""
        self.last_batch: PlannedBatch | None = None
        self._scheduler = _AnswerRecorder(controller.scheduler)
        controller.scheduler = self._scheduler  # type: ignore[assignment]
        dispatcher = controller.dispatcher
        self._task_factory = dispatcher.task_factory
        dispatcher.task_factory = self._collecting_task
        controller.collector_hook = self  # type: ignore[attr-defined]

    def next_batch(
        self,
        prepare: Callable[[], list[Item]],
        plan: Callable[[PlannedBatch], BatchPlan],
    ) -> PlannedBatch:
        """Return AReaL's next batch, its items in the order in which they were issued.

        It is planned in the background: whoever needs the plan waits for it.

        Args:
            prepare: AReaL's ``prepare_batch``.
            plan: makes the plan; called in the collector's thread.
        """
        # The items, by task id: the order of arrival must not matter
        self._evict_stale()
        items: list[Item] = []
        while not items:  # with dynamic_bs all of a batch may have been rejected
            items = prepare()
        with self.collector.timed("wait"):
            by_task_id = {self._task_id_of.pop(id(item)): item for item in items}
            task_ids = sorted(by_task_id)
            items = [by_task_id[task_id] for task_id in task_ids]
            prompt_ids = [self._end_task(task_id) for task_id in task_ids]
            if self._prompts is not None:
                logger.info(f"step {self.step}: prompts {format_ranges(prompt_ids)}")
            # Their sequences, which are fetched if the collector could not hold them
            sequences = self.collector.take(task_ids)
            if sequences is None:
                batch = to_planned_batch(items)
            else:
                batch = PlannedBatch(items, sequences)
            batch.step = self.step
            # The plan
            planning = self._thread.submit(self._plan, plan, batch)
            batch.wait = lambda: self._wait(planning)
        self.step += 1
        self.last_batch = batch
        return batch

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _plan(
        self, plan: Callable[[PlannedBatch], BatchPlan], batch: PlannedBatch
    ) -> None:
        """Runs in the collector's thread."""
        with self.collector.timed("plan", time.thread_time):
            plan(batch)

    def _wait(self, planning: Future[None]) -> None:
        with self.collector.timed("wait"):
            planning.result(timeout=_PLAN_TIMEOUT_SECONDS)

    def _collecting_task(self, task: Any) -> Callable[[], Any]:
        run = self._task_factory(task)

        async def submit_then_wait() -> Any:
            task_id = task.task_id
            self._prompt_of[task_id] = task.data
            result = await run()
            was_answered = self._scheduler.pop_answered(task_id)
            if result is None:
                self.collector.count_rejected("filtered")
                self._end_task(task_id, again=not was_answered)
                return None
            loop = asyncio.get_running_loop()
            reason = await loop.run_in_executor(
                self._thread, self._take_in, task_id, result.trajectory
            )
            if reason is None:
                return result
            self._count_as_rejected()
            self._end_task(task_id, again=reason == "stale")
            return None

        return submit_then_wait

    def _take_in(self, task_id: int, item: Item) -> str | None:
        """Runs in the collector's thread; returns the reason of a rejection."""
        with self.collector.timed("fetch"):
            (local,) = fetch([item], FETCHED_KEYS)
            forget([item], [key for key in FETCHED_KEYS if key not in _FETCHED_AGAIN])
        # Not get_version(): its lock is held while all workers are told a new version.
        version = self._controller._version
        try:
            self.collector.offer(task_id, local, version)
        except Rejected as rejected:
            delete(item)
            return rejected.reason
        self._task_id_of[id(item)] = task_id
        return None

    def _evict_stale(self) -> None:
        """Take what became stale back from AReaL's results, too."""
        stale = self.collector.find_stale(self._controller.get_version())
        dispatcher = self._controller.dispatcher
        with dispatcher._result_cv:
            dropped = {
                task_id: dispatcher._pending_results.pop(task_id)
                for task_id in stale  # some may be on their way there
                if task_id in dispatcher._pending_results
            }
            dispatcher._active_task_ids.difference_update(dropped)
        self.collector.evict(list(dropped))
        for task_id, result in dropped.items():
            item = result.data.trajectory
            self._task_id_of.pop(id(item), None)
            self._count_as_rejected()
            self._end_task(task_id, again=True)
            delete(item)
        with dispatcher._input_cv:
            dispatcher._input_cv.notify()

    def _count_as_rejected(self) -> None:
        """Correct AReaL's statistics, which count the rollout as accepted."""
        manager: Any = self._controller.staleness_manager
        with manager.lock:
            manager.rollout_stat.accepted -= 1
            manager.rollout_stat.rejected += 1

    def _end_task(self, task_id: int, again: bool = False) -> int:
        """Finish the prompt of a task, or issue it again; returns its id or -1."""
        prompt = self._prompt_of.pop(task_id, None)
        if self._prompts is None or prompt is None:
            return -1
        end = self._prompts.issue_again if again else self._prompts.finish
        prompt_id = end(prompt)
        return -1 if prompt_id is None else prompt_id


def format_ranges(numbers: Iterable[int]) -> str:
    """Write integers as text: ``0-3 5 7-8``."""
    # In a run of consecutive numbers, number - index stays the same.
    indexed = enumerate(sorted(numbers))
    runs = [[n for _, n in run] for _, run in groupby(indexed, lambda x: x[1] - x[0])]
    return " ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


class _AnswerRecorder:
    """Scheduler that records which tasks were answered by their worker.

    AReaL's controller reports a rollout that was filtered out in the same way as one
    whose worker could not be reached.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._answered: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def pop_answered(self, task_id: int) -> bool:
        was_answered = task_id in self._answered
        self._answered.discard(task_id)
        return was_answered

    async def async_call_engine(
        self, worker_id: str, method: str, *args: Any, **kwargs: Any
    ) -> Any:
        result = await self._scheduler.async_call_engine(
            worker_id, method, *args, **kwargs
        )
        if method == "wait_for_task":
            self._answered.add(kwargs["task_id"])
        return result
