"""Hook between AReaL's rollout controller and the collector: where results arrive.

A result is taken in when the controller has fetched it from its worker and before it
counts towards a batch, in one of a few threads of the collector's own: a large result,
or a worker that does not answer, keeps no other one waiting. Plans are made in a thread
beside them. For AReaL's staleness control, a result that is rejected here, or whose
tensors cannot be fetched, is a rejected rollout: its place in AReaL's capacity is given
back. `rejections` says whose prompts are issued again.

What was submitted by ``submit`` or ``rollout_batch`` belongs to their caller, and is
not collected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any

from areal.infra import RolloutController
from areal.infra.rpc.rtensor import RTensor
from areal.utils import logging

from areal_dta.areal_fixes.trainer_steps import free_tensors
from areal_dta.collector.collector import Collector
from areal_dta.collector.planned_batch import PlannedBatch, to_planned_batch
from areal_dta.collector.planner import BatchPlan
from areal_dta.collector.prompt_issuer import PromptIssuer
from areal_dta.collector.rejections import ISSUED_AGAIN, Rejected, TooManyRejected
from areal_dta.collector.remote_tensors import FetchMeter, fetch, forget
from areal_dta.collector.validate_trajectory import FETCHED_KEYS
from areal_dta.config.composed import one_line
from areal_dta.engine.batch import has_images
from areal_dta.engine.row_share import Item

logger = logging.getLogger("Collection")

_PLAN_TIMEOUT_SECONDS = 600.0
_UNKNOWN = 2**63  # a task id behind all others
_NUM_TAKERS = 8  # threads; they mostly wait for workers
# The report compares these with the trainer's logprobs: they stay in the buffer.
_FETCHED_AGAIN = ("attention_mask", "loss_mask", "logprobs", "versions")


class CollectorHook:
    """A collector at work on one rollout controller.

    Args:
        controller: must be initialized.
        prompts: told what became of each prompt; None if it did not issue them.
        fetch_timeout_seconds: of one attempt to fetch or free tensors.
    """

    def __init__(
        self,
        controller: RolloutController,
        collector: Collector,
        prompts: PromptIssuer | None = None,
        fetch_timeout_seconds: float = 120.0,
    ) -> None:
        self.collector = collector
        self._controller, self._prompts = controller, prompts
        self._takers = ThreadPoolExecutor(_NUM_TAKERS, thread_name_prefix="collector")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self.traffic = FetchMeter(fetch_timeout_seconds)
        self._undo_traffic = self.traffic.install()
        self._stopped: TooManyRejected | None = None
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
        self._uncollected: set[int] = set()  # task ids
        self._submit = controller.submit
        controller.submit = self._submit_uncollected  # type: ignore[method-assign]
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
            plan: makes the plan; called in the planner's thread.

        Raises:
            TooManyRejected: too few results can be trained on.
        """
        # The items, by task id: the order of arrival must not matter
        if self.collector.max_staleness is not None:
            self._evict_stale()
        items: list[Item] = []
        while not items:  # with dynamic_bs all of a batch may have been rejected
            try:
                items = prepare()
            except RuntimeError:
                if self._stopped is not None:  # AReaL wraps it
                    raise self._stopped from None
                raise
        with self.collector.timed("wait"):
            # One that somebody submitted and AReaL put into the batch is not known.
            ids = [self._task_id_of.pop(id(item), _UNKNOWN) for item in items]
            pairs = sorted(zip(ids, items, strict=True), key=lambda pair: pair[0])
            task_ids, items = [n for n, _ in pairs], [item for _, item in pairs]
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
            timed = self.collector.timed("plan", time.thread_time)
            planning = self._thread.submit(timed(plan), batch)
            waited = self.collector.timed("wait")
            batch.wait = partial(waited(planning.result), _PLAN_TIMEOUT_SECONDS)
        self.step += 1
        self.last_batch = batch
        return batch

    def close(self) -> None:
        for threads in (self._takers, self._thread):
            threads.shutdown(wait=False, cancel_futures=True)
        self._undo_traffic()

    def _collecting_task(self, task: Any) -> Callable[[], Any]:
        run = self._task_factory(task)

        async def submit_then_wait() -> Any:
            task_id = task.task_id
            if task_id in self._uncollected:
                self._uncollected.discard(task_id)
                result = await run()
                self._scheduler.pop_answered(task_id)
                return result
            self._prompt_of[task_id] = task.data
            result = await run()
            was_answered = self._scheduler.pop_answered(task_id)
            if result is not None:
                loop = asyncio.get_running_loop()
                reason = await loop.run_in_executor(
                    self._takers, self._take_in, task_id, result.trajectory
                )
                if reason is None:
                    return result
                self._count_as_rejected()
            elif was_answered:
                reason = "filtered"
                self.collector.reject(task_id, reason, "left out by the workflow")
            else:
                reason = "failed"
                message = "no answer in time, or its worker is gone"
                self.collector.reject(task_id, reason, message)
            self._end_task(task_id, reason)
            self._stop_if_hopeless()
            return None

        return submit_then_wait

    def _submit_uncollected(
        self,
        data: Any,
        workflow: Any,
        workflow_kwargs: Any = None,
        should_accept_fn: Any = None,
        task_id: int | None = None,
        **kwargs: Any,
    ) -> int:
        """Submit a rollout whose result is not part of a batch."""
        if task_id is None:
            task_id = self._controller._task_id_generator.next()
        self._uncollected.add(task_id)
        return self._submit(
            data, workflow, workflow_kwargs, should_accept_fn, task_id, **kwargs
        )

    def _take_in(self, task_id: int, item: Item) -> str | None:
        """Runs in a thread of the collector; returns the reason of a rejection."""
        reason: str | None = None
        try:
            with self.collector.timed("fetch"):
                (local,) = fetch([item], FETCHED_KEYS)
            if not self.collector.takes_images:
                local |= {key: item[key] for key in has_images(item)}  # not fetched
            # Not get_version(): its lock is held while workers are told a new version.
            version = self._controller._version
            self.collector.offer(task_id, local, version, _source(item))
            self._task_id_of[id(item)] = task_id
        except Rejected as rejected:
            reason = rejected.reason
        except Exception as error:
            # Whatever network, worker or decoding raise costs this result. Passed on,
            # it would also cost a place in AReaL's capacity, and in the end the run.
            reason = "failed"
            logger.debug(f"result {task_id} was not taken in", exc_info=True)
            message = f"{type(error).__name__}: {one_line(error)}"
            self.collector.reject(task_id, reason, message)
        kept = () if reason else _FETCHED_AGAIN
        forget([item], [key for key in FETCHED_KEYS if key not in kept])
        if reason not in (None, "duplicate"):  # a duplicate's are another's, too
            self._takers.submit(free_tensors, item)
        return reason

    def _stop_if_hopeless(self) -> None:
        """Let AReaL's waiting trainer fail if too little can be trained on."""
        why = self.collector.why_stop()
        if why is None or self._stopped is not None:
            return
        self._stopped = TooManyRejected(why)
        dispatcher = self._controller.dispatcher
        dispatcher._set_thread_exception(self._stopped)
        with dispatcher._result_cv:
            dispatcher._result_cv.notify_all()

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
            self._end_task(task_id, "stale")
            self._takers.submit(free_tensors, item)
        with dispatcher._input_cv:
            dispatcher._input_cv.notify()

    def _count_as_rejected(self) -> None:
        """Correct AReaL's statistics, which count the rollout as accepted."""
        manager: Any = self._controller.staleness_manager
        with manager.lock:
            manager.rollout_stat.accepted -= 1
            manager.rollout_stat.rejected += 1

    def _end_task(self, task_id: int, reason: str | None = None) -> int:
        """Finish the prompt of a task, or issue it again; returns its id or -1.

        Args:
            reason: why its result is not trained on; None if it is.
        """
        prompt = self._prompt_of.pop(task_id, None)
        if self._prompts is None or prompt is None:
            return -1
        if reason in ISSUED_AGAIN:
            prompt_id = self._prompts.issue_again(prompt, has_failed=reason == "failed")
        else:
            prompt_id = self._prompts.finish(prompt)
        return -1 if prompt_id is None else prompt_id


def _source(item: Item) -> Any:
    """Return what identifies a result's tensors on their worker; None if at hand."""
    ids = item.get("input_ids") if isinstance(item, dict) else None
    return ids.shard.shard_id if isinstance(ids, RTensor) else None


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
