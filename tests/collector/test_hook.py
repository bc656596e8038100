"""Results on their way through AReaL's controller, dispatcher and staleness control.

Only the workers are stood in for: a scheduler that answers with ready-made results.
"""

import asyncio
import random
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from areal.api import Worker
from areal.api.cli_args import InferenceEngineConfig
from areal.infra.controller.rollout_controller import RolloutController
from areal.infra.rpc import rtensor
from areal.infra.rpc.rtensor import RTensor, TensorShardInfo
from areal.infra.staleness_manager import StalenessManager
from areal.infra.workflow_executor import BatchTaskDispatcher
from areal.utils import logging
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from areal_dta.collector.collector import Collector
from areal_dta.collector.hook import CollectorHook
from areal_dta.collector.planner import BatchPlanner
from areal_dta.collector.prompt_loader import (
    MAX_TRIES,
    PROMPT_ID_KEY,
    PromptLoader,
)
from areal_dta.collector.rejections import RejectionWatch, TooManyRejected
from areal_dta.collector.remote_tensors import FetchMeter, fetch
from tests.engine.dispatch_scenarios import make_items

BATCH = 4


class Workers:
    """Answers in place of rollout workers, in any order.

    Args:
        fates: index of a prompt -> what becomes of its rollouts.
        wait: awaited with an index before its rollout ends.
    """

    def __init__(self, fates, wait=None):
        self.fates, self.wait = fates, wait
        self.controller = None
        self.results = {}
        self.prompts = []  # indices, as they were submitted
        self._random = random.Random(0)

    async def async_call_engine(self, worker_id, method, *args, **kwargs):
        number = kwargs["task_id"]
        if method == "submit":
            index = kwargs["data"]["index"]
            self.prompts.append(index)
            # with the version that generates its first token
            self.results[number] = index, self.controller._version
            if self.wait is None:
                await asyncio.sleep(self._random.random() / 50)
            else:
                await self.wait(index)
            fate = self.fates.get(index)
            if fate == "slow":  # AReaL issues more after a second
                await asyncio.sleep(1.3)
            if fate == "unreachable once":
                del self.fates[index]
            if fate in ("unreachable", "unreachable once"):
                raise ConnectionError("worker is gone")
            self.controller._resolve_task_future(number)
            return number
        assert method == "wait_for_task"
        return self._result(*self.results[number])

    def _result(self, index, version):
        if self.fates.get(index) == "filtered":
            return None
        (item,) = make_items((3,), seed=index)
        item["index"] = torch.full((3,), index)
        item["versions"][item["versions"] >= 0] = version
        if self.fates.get(index) == "nan":
            item["rewards"][0] = torch.nan
        if self.fates.get(index, "").startswith("lost"):
            # on a worker that is gone
            shard = TensorShardInfo(f"shard {index}", "127.0.0.1:9")
            item["input_ids"] = RTensor(shard, item["input_ids"].to("meta"))
        if self.fates.get(index) == "lost once":
            del self.fates[index]
        return item


def prompt_loader(num=12, batch_size=BATCH, shuffle=False, **options):
    data = [{"index": i} for i in range(num)]
    sampler = DistributedSampler(data, 1, 0, shuffle=shuffle, drop_last=True)
    return PromptLoader(
        StatefulDataLoader(
            data, batch_size, sampler=sampler, drop_last=True, collate_fn=lambda x: x
        ),
        **options,
    )


def test_issued_prompts_name_their_id_and_try():
    """The embedded server's draws follow from them."""
    loader = prompt_loader(add_ids=True)
    (first,) = next(iter(loader))
    assert first == {"index": 0, PROMPT_ID_KEY: "0/0"}
    loader.issue_again(first)
    (again,), (second,) = next(iter(loader)), next(iter(loader))
    assert [again[PROMPT_ID_KEY], second[PROMPT_ID_KEY]] == ["0/1", "1/0"]
    resumed = prompt_loader(add_ids=True)
    resumed.load_state_dict(loader.state_dict())
    issued = [next(iter(resumed))[0][PROMPT_ID_KEY] for _ in range(3)]
    assert issued == ["0/0", "1/0", "2/0"]
    assert PROMPT_ID_KEY not in next(iter(prompt_loader()))[0]


class Rollout:
    """A controller with a collection, without processes."""

    def __init__(
        self,
        fates=None,
        staleness=1,
        loader=None,
        wait=None,
        max_staleness=None,
        is_collected=True,
        **limits,
    ):
        self.workers = Workers(fates or {}, wait)
        config = InferenceEngineConfig(
            backend="sglang:d1",
            consumer_batch_size=BATCH,
            max_concurrent_rollouts=2 * BATCH,
            max_head_offpolicyness=staleness,
            request_timeout=20,
        )
        self.controller = controller = RolloutController(None, config, self.workers)
        self.workers.controller = controller
        controller.workers = [Worker(id="rollout/0", ip="127.0.0.1")]
        controller._worker_role = "rollout"
        controller._callback_host, controller._callback_port = "127.0.0.1", 1
        controller._staleness_manager = StalenessManager(
            controller, 2 * BATCH, BATCH, staleness
        )
        controller._dispatcher = BatchTaskDispatcher(
            64, controller._create_submit_callback, controller._staleness_manager
        )
        controller._dispatcher.initialize(logger=logging.getLogger("test"))
        self.loader = loader or prompt_loader(100)
        self.collector = Collector(
            max_staleness=max_staleness, watch=RejectionWatch(BATCH, **limits)
        )
        self.hook = None
        if is_collected:
            self.hook = CollectorHook(
                controller, self.collector, self.loader, fetch_timeout_seconds=1.0
            )
        self.planner = BatchPlanner()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.hook is not None:
            self.hook.close()
        self.controller._dispatcher.destroy()

    def batch(self, **kwargs):
        def prepare():
            return self.controller.prepare_batch(
                self.loader, workflow="any", group_size=3, **kwargs
            )

        if self.hook is None:
            return prepare()
        return self.hook.next_batch(
            prepare, lambda batch: batch.plan_now(self.planner, 2, 1)
        )

    def set_version(self, version):
        self.controller._version = version
        dispatcher = self.controller._dispatcher
        with dispatcher._input_cv:
            dispatcher._input_cv.notify()

    def wait_until(self, condition):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def indices(batch):
    return [int(item["index"][0]) for item in batch]


def test_a_batch_comes_in_the_order_of_issue_with_its_plan():
    with Rollout() as rollout:
        seen = []
        for version in range(3):
            batch = rollout.batch()
            found = indices(batch)
            assert found == sorted(found) and len(found) == BATCH
            plan = batch.plan(rollout.planner, 2, 1)
            owners = {o for r in range(2) for o in plan.rows(r, 0)}
            assert owners == {(i, row) for i in range(BATCH) for row in range(3)}
            tokens = sum(int(item["attention_mask"].sum()) for item in batch)
            assert batch.sequences.stats.num_sequence_tokens == tokens
            seen += found
            rollout.set_version(version + 1)
        assert len(set(seen)) == len(seen)
        metrics = rollout.collector.take_metrics(10.0)
        assert metrics["collector/inserted"] >= 12
        assert metrics["collector/plan_seconds"] > 0


def test_what_became_of_each_prompt_is_saved():
    fates = {1: "filtered", 2: "nan", 3: "unreachable once"}
    with Rollout(fates) as rollout:
        trained = []
        for version in range(4):
            trained += indices(rollout.batch())
            rollout.set_version(version + 1)
        assert not {1, 2} & set(trained)
        # its worker did not answer: it was tried again
        assert rollout.workers.prompts.count(3) == 2 and 3 in trained
        state = rollout.loader.state_dict()
        finished = set(range(state["next"])) - set(state["unsettled"])
        assert finished == {1, 2, *trained}
        stats = rollout.controller.staleness_manager.get_stats
        assert stats().rejected == 3

        def balanced():  # AReaL counts a result just before it is taken in
            num_waiting = len(rollout.collector.waiting_task_ids)
            return stats().accepted == num_waiting + len(trained)

        rollout.wait_until(balanced)
        metrics = rollout.collector.take_metrics(1.0)
        assert metrics["collector/rejected/nan"] == 1
        assert metrics["collector/rejected/filtered"] == 1
        assert metrics["collector/rejected/failed"] == 1


def test_a_restart_issues_once_more_what_was_not_trained():
    with Rollout({2: "slow"}, loader=prompt_loader()) as rollout:
        trained = indices(rollout.batch())
        state = rollout.loader.state_dict()
    assert state["next"] > BATCH
    loader = prompt_loader()
    loader.load_state_dict(state)
    with Rollout(loader=loader) as rollout:
        for version in range(2):
            trained += indices(rollout.batch())
            rollout.set_version(version + 1)
    assert sorted(trained) == list(range(12))  # an epoch: none lost, none twice


def test_results_that_became_stale_are_taken_back_and_run_again():
    with Rollout({2: "slow"}, staleness=1, max_staleness=1) as rollout:
        first = indices(rollout.batch())
        waits = rollout.controller._dispatcher._pending_results
        rollout.wait_until(lambda: len(waits) == BATCH)  # all that may run ahead
        ahead = [i for i in rollout.workers.prompts if i not in first][:BATCH]
        rollout.set_version(2)  # they were begun by version 0
        second = indices(rollout.batch())
        metrics = rollout.collector.take_metrics(1.0)
        assert metrics["collector/evicted_stale"] == BATCH
        for index in ahead:
            assert rollout.workers.prompts.count(index) == 2
        assert len(second) == BATCH
        stats = rollout.controller.staleness_manager.get_stats()
        assert stats.rejected in (BATCH, BATCH + 1)  # the slow one may have come


def test_tensors_that_cannot_be_fetched_cost_a_result_and_not_the_run():
    """0.1.0 never gave the place in AReaL's capacity back, and waited for ever."""
    fates = {index: "lost once" for index in range(5)}
    with Rollout(fates) as rollout:
        trained = []
        for version in range(100):
            trained += indices(rollout.batch())
            rollout.set_version(version + 1)
            if set(range(5)) <= set(trained):  # put back, and trained
                break
            time.sleep(0.1)  # AReaL's client tries three times, seconds apart
        assert set(range(5)) <= set(trained)
        metrics = rollout.collector.take_metrics(1.0)
        assert metrics["collector/rejected/failed"] == 5
        stats = rollout.controller.staleness_manager.get_stats
        assert stats().rejected == 5

        def balanced():
            num_waiting = len(rollout.collector.waiting_task_ids)
            return stats().accepted == num_waiting + len(trained)

        rollout.wait_until(balanced)


@pytest.mark.parametrize("fate", ["filtered", "lost", "unreachable"])
def test_a_workflow_without_results_stops_with_the_reasons(fate):
    """0.1.0 waited for ever."""
    fates = {index: fate for index in range(100)}
    with Rollout(fates, max_batches_without_result=3) as rollout:
        with pytest.raises(TooManyRejected, match="none of the last 1[2-9] results"):
            rollout.batch()


def test_too_many_bad_trajectories_stop_the_run_with_the_reasons():
    fates = {index: "nan" for index in range(100) if index % 4}
    with Rollout(fates) as rollout:
        with pytest.raises(TooManyRejected, match="nan.*rewards holds NaN"):
            for version in range(4):
                rollout.batch()
                rollout.set_version(version + 1)


def test_results_of_a_caller_of_its_own_are_not_collected():
    """In 0.1.0 they stayed in the forest for ever."""
    with Rollout() as rollout:
        data = [{"index": 50 + i} for i in range(3)]
        results = rollout.controller.rollout_batch(data, workflow="any", group_size=3)
        assert sorted(indices(results)) == [50, 51, 52]
        assert rollout.collector.total.num_sequences == 0
        assert len(rollout.batch()) == BATCH


def test_a_result_that_somebody_submitted_may_end_up_in_a_batch():
    with Rollout() as rollout:
        rollout.controller.submit({"index": 50}, "any", group_size=3)
        rollout.wait_until(lambda: len(rollout.controller.dispatcher._pending_results))
        batch = rollout.batch()
        assert indices(batch)[-1] == 50 and len(batch) == BATCH
        plan = batch.plan(rollout.planner, 2, 1)
        assert len({o for r in range(2) for o in plan.rows(r, 0)}) == 3 * BATCH


def test_a_slow_fetch_keeps_no_other_result_waiting(monkeypatch):
    """0.1.0 had one thread for all."""
    go_on, slow = threading.Event(), []
    stock = RTensor.localize

    def localize(items):
        if int(items[0]["input_ids"].sum()) in slow:
            assert go_on.wait(timeout=30)
        return stock(items)

    (item,) = make_items((3,), seed=0)
    slow.append(int(item["input_ids"].sum()))
    monkeypatch.setattr(RTensor, "localize", localize)
    with Rollout() as rollout:
        first = indices(rollout.batch())
        assert 0 not in first and len(first) == BATCH
        go_on.set()
        rollout.set_version(1)
        assert 0 in indices(rollout.batch())


def test_a_worker_that_does_not_answer_is_given_up_in_time():
    """0.1.0 waited for an hour, three times over."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        shard = TensorShardInfo("any", f"127.0.0.1:{silent.getsockname()[1]}")
        undo = FetchMeter(timeout_seconds=0.1).install()
        try:
            started = time.monotonic()
            with pytest.raises(RuntimeError, match="after 3 attempts"):
                fetch([{"x": RTensor(shard, torch.zeros(1, device="meta"))}], ["x"])
            assert time.monotonic() - started < 60
        finally:
            undo()


def test_what_is_fetched_is_counted():
    meter = FetchMeter(1.0)
    meter._backend = SimpleNamespace(fetch=lambda shards: [torch.zeros(3)] * 2)
    undo = meter.install()
    try:
        shards = [TensorShardInfo(f"count {i}", "nowhere:1") for i in range(2)]
        item = {
            f"x{i}": RTensor(s, torch.zeros(3, device="meta"))
            for i, s in enumerate(shards)
        }
        fetch([item], list(item))
        fetch([item], list(item))  # AReaL's buffer has them
    finally:
        undo()
        rtensor.clear_fetch_buffer(shard.shard_id for shard in shards)
    metrics = meter.take_metrics()
    assert metrics["collector/fetched_bytes"] == 24
    assert metrics["collector/fetched_tensors"] == 2
    assert meter.take_metrics()["collector/fetched_bytes"] == 0


def test_the_accounts_do_not_wait_for_the_data_set():
    """In 0.1.0 the event loop of all rollouts waited for a slow data set."""
    loader = prompt_loader()
    first = next(iter(loader))[0]
    reading, go_on = threading.Event(), threading.Event()

    class Slow:
        def __getitem__(self, index):
            reading.set()
            assert go_on.wait(timeout=30)
            return {"index": index}

    loader._dataset = Slow()
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start()
    assert reading.wait(timeout=30)
    finished = []
    finishing = threading.Thread(target=lambda: finished.append(loader.finish(first)))
    finishing.start()
    finishing.join(timeout=10)
    was_finished = finished == [0]
    go_on.set()
    for waiting in (thread, finishing):
        waiting.join(timeout=30)
    assert was_finished


class Clock:
    """Simulated time in steps."""

    def __init__(self):
        self.now = 0.0

    async def sleep(self, steps):
        end = self.now + steps
        while self.now < end:
            await asyncio.sleep(0.002)


def slow_prompts_trained(is_collected):
    """One prompt of 8 lasts 3.2 steps, the others 0.1; 64 are trained."""
    clock = Clock()

    async def wait(index):
        await clock.sleep(3.2 if index % 8 == 0 else 0.1)

    ended = threading.Event()

    def tick():  # slowly, so that whoever waits for a batch gets one
        while not ended.wait(0.2):
            clock.now += 0.1

    with Rollout(wait=wait, is_collected=is_collected) as rollout:
        ticking = threading.Thread(target=tick)
        ticking.start()
        trained = []
        try:
            for version in range(64 // BATCH):
                trained += indices(rollout.batch())
                clock.now += 1.0
                rollout.set_version(version + 1)
        finally:
            ended.set()
            ticking.join()
        if is_collected:
            metrics = rollout.collector.take_metrics(1.0)
            assert metrics["collector/dropped"] == 0
    assert len(trained) == 64
    return sum(index % 8 == 0 for index in trained)


def test_slow_rollouts_are_trained_as_by_areal_alone():
    """In 0.1.0 none of them was: all were rejected as stale, and then given up."""
    stock, ours = slow_prompts_trained(False), slow_prompts_trained(True)
    assert stock > 0 and abs(stock - ours) <= 1


def test_a_prompt_is_never_given_up_for_its_age():
    loader = prompt_loader()
    prompts = iter(loader)
    prompt_id = None
    for _ in range(2 * MAX_TRIES):
        (prompt,) = next(prompts)
        prompt_id = loader.issue_again(prompt, has_failed=False)
        assert prompt_id == 0
    assert 0 in loader.state_dict()["unsettled"]


def test_dynamic_batches():
    fates = {i: "filtered" for i in (0, 1, 2, 3, 5)}
    with Rollout(fates) as rollout:
        batch = rollout.batch(dynamic_bs=True)
        # the first four attempts may all be rejected: then the next batch is taken
        assert 1 <= len(batch) <= BATCH
        assert not set(fates) & set(indices(batch))
        assert batch.sequences.order.num_sequence_tokens > 0


def test_a_prompt_that_never_works_is_given_up():
    with Rollout({0: "unreachable"}) as rollout:
        for version in range(3):
            rollout.batch()
            rollout.set_version(version + 1)
        assert rollout.workers.prompts.count(0) == MAX_TRIES
        state = rollout.loader.state_dict()
        assert 0 not in state["unsettled"]


def test_prompts_follow_the_shuffle_of_their_epoch():
    def epochs(loader, num):
        prompts = iter(loader)
        return [[next(prompts)[0]["index"] for _ in range(12)] for _ in range(num)]

    first, second, third = epochs(prompt_loader(shuffle=True), 3)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != third
    # a restart within the second epoch, with nothing in flight
    loader = prompt_loader(shuffle=True)
    prompts = iter(loader)
    for _ in range(17):
        loader.finish(next(prompts)[0])
    again = prompt_loader(shuffle=True)
    again.load_state_dict(loader.state_dict())
    prompts = iter(again)
    rest = [next(prompts)[0]["index"] for _ in range(19)]
    assert rest == second[5:] + third


@pytest.mark.parametrize(
    "state, message",
    [
        ({"_snapshot": {}}, "another version"),
        (
            {
                "format": "areal_dta.prompts/1",
                "num_prompts": 7,
                "next": 0,
                "unsettled": [],
            },
            "7 prompts per epoch",
        ),
    ],
)
def test_a_state_of_something_else_is_refused(state, message):
    with pytest.raises(ValueError, match=message):
        prompt_loader().load_state_dict(state)
