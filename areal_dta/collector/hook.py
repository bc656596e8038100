"""Between AReaL's rollout controller and the collector.

Results are taken in where they arrive: when the controller has fetched one from its
worker and before it counts towards a batch, in a thread of the collector's own. What
is rejected there is, for AReaL's staleness control, a rejected rollout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from areal.infra import RolloutController
from areal.utils import logging

from areal_dta.collector.collector import Collector
from areal_dta.collector.planned_batch import PLANNED_KEYS, Item, PlannedBatch, planned
from areal_dta.collector.planner import BatchPlan
from areal_dta.collector.prompt_loader import PromptLoader
from areal_dta.collector.remote_tensors import delete, fetch, forget
from areal_dta.collector.validate_trajectory import FETCHED_KEYS, Rejected

logger = logging.getLogger("Collection")

_PLAN_TIMEOUT_SECONDS = 600.0
_READ_LATER = (*PLANNED_KEYS, "rewards")  # by who measures the batch


class Collection:
    """A collector at work on one controller, which must be initialized.

    Args:
        prompts: told what became of each prompt, if it issued them.
    """

    def __init__(
        self,
        controller: RolloutController,
        collector: Collector,
        prompts: PromptLoader | None = None,
    ) -> None:
        self.collector = collector
        self._controller, self._prompts = controller, prompts
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="collector")
        self._tasks: dict[int, Any] = {}  # task number -> prompt
        self._number_of: dict[int, int] = {}  # id of an item's dict -> task number
        self.step = 0
        """Of the next batch."""
        self.last_batch: PlannedBatch | None = None
        self._answers = _Answers(controller.scheduler)
        controller.scheduler = self._answers  # type: ignore[assignment]
        dispatcher = controller.dispatcher
        self._factory = dispatcher.task_factory
        dispatcher.task_factory = self._collected
        controller.collection = self  # type: ignore[attr-defined]

    def next_batch(
        self,
        prepare: Callable[[], list[Item]],
        plan: Callable[[PlannedBatch], BatchPlan],
    ) -> PlannedBatch:
        """AReaL's next batch, its items in the order in which they were issued.

        It is planned meanwhile: who needs the plan waits for it.
        """
        self._evict_stale()
        items: list[Item] = []
        while not items:  # with dynamic_bs all of a batch may have been rejected
            items = prepare()
        started = time.perf_counter()
        numbers = [self._number_of.pop(id(item)) for item in items]
        order = sorted(range(len(items)), key=numbers.__getitem__)
        items, numbers = [items[i] for i in order], sorted(numbers)
        prompts = [self._settle(number) for number in numbers]
        if self._prompts is not None:
            logger.info(f"step {self.step}: prompts {ranges(prompts)}")
        leaves = self.collector.take(numbers)
        if leaves is None:  # more than it was allowed to hold
            batch = planned(items)
        else:
            batch = PlannedBatch(items, leaves)
        batch.step = self.step
        self.step += 1
        self.last_batch = batch
        planning = self._executor.submit(self._plan, plan, batch)
        batch.wait = lambda: self._wait(planning)
        self.collector.add_seconds("wait", time.perf_counter() - started)
        return batch

    def _plan(
        self, plan: Callable[[PlannedBatch], BatchPlan], batch: PlannedBatch
    ) -> None:
        """Runs in the collector's thread."""
        started = time.thread_time()
        plan(batch)
        self.collector.add_seconds("plan", time.thread_time() - started)

    def _wait(self, planning: Future[None]) -> None:
        started = time.perf_counter()
        planning.result(timeout=_PLAN_TIMEOUT_SECONDS)
        self.collector.add_seconds("wait", time.perf_counter() - started)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _collected(self, task: Any) -> Callable[[], Any]:
        run = self._factory(task)

        async def submit_then_wait() -> Any:
            number = task.task_id
            self._tasks[number] = task.data
            result = await run()
            was_answered = self._answers.pop(number)
            if result is None:
                self.collector.count_rejected("filtered")
                self._settle(number, again=not was_answered)
                return None
            loop = asyncio.get_running_loop()
            item = result.trajectory
            rejected = await loop.run_in_executor(
                self._executor, self._take_in, number, item
            )
            if rejected is None:
                return result
            self._uncount_accepted()
            self._settle(number, again=rejected == "stale")
            return None

        return submit_then_wait

    def _take_in(self, number: int, item: Item) -> str | None:
        """Runs in the collector's thread; the reason of a rejection, or None."""
        started = time.perf_counter()
        (local,) = fetch([item], FETCHED_KEYS)
        later = [key for key in FETCHED_KEYS if key not in _READ_LATER]
        forget([item], later)
        self.collector.add_seconds("fetch", time.perf_counter() - started)
        # not get_version(): its lock is held while all workers are told a new one
        version = self._controller._version
        try:
            self.collector.offer(number, local, version)
        except Rejected as rejected:
            delete(item)
            return rejected.reason
        self._number_of[id(item)] = number
        return None

    def _evict_stale(self) -> None:
        """Take what became stale back from AReaL's results, too."""
        stale = self.collector.stale(self._controller.get_version())
        dispatcher = self._controller.dispatcher
        with dispatcher._result_cv:
            dropped = {
                number: dispatcher._pending_results.pop(number)
                for number in stale  # some may be on their way there
                if number in dispatcher._pending_results
            }
            dispatcher._active_task_ids.difference_update(dropped)
        self.collector.evict(list(dropped))
        for number, result in dropped.items():
            item = result.data.trajectory
            self._number_of.pop(id(item), None)
            self._uncount_accepted()
            self._settle(number, again=True)
            delete(item)
        with dispatcher._input_cv:
            dispatcher._input_cv.notify()

    def _uncount_accepted(self) -> None:
        """AReaL has counted it as accepted."""
        manager: Any = self._controller.staleness_manager
        with manager.lock:
            manager.rollout_stat.accepted -= 1
            manager.rollout_stat.rejected += 1

    def _settle(self, number: int, again: bool = False) -> int:
        """A task is over; the number of its prompt."""
        prompt = self._tasks.pop(number, None)
        if self._prompts is None or prompt is None:
            return -1
        of_prompt = self._prompts.number_of(prompt)
        if again:
            self._prompts.put_back(prompt)
        else:
            self._prompts.settle(prompt)
        return -1 if of_prompt is None else of_prompt


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as text: ``0-3 5 7-8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class _Answers:
    """A scheduler that remembers which tasks were answered by their worker.

    AReaL's controller reports a rollout that was filtered out and one whose worker
    could not be reached alike.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._answered: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def pop(self, number: int) -> bool:
        was_answered = number in self._answered
        self._answered.discard(number)
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
