import threading
import time
from collections.abc import Iterator

import pytest

from areal_dta.rollout_server.answers import ABORTED_BEFORE_PREFILL, GenerationError
from areal_dta.rollout_server.generation_thread import (
    GenerationThread,
    QueueFullError,
    ThreadDeadError,
)
from tests.rollout_server.builders import make_generator, make_task, wait_until

TIMEOUT = 60.0


class GatedSteps:
    """Lets a test decide how many decode steps the worker may take."""

    def __init__(self, generator) -> None:
        self._step = generator.step
        self._permits = threading.Semaphore(0)
        self.num_started = 0

    def __call__(self):
        self.num_started += 1
        assert self._permits.acquire(timeout=TIMEOUT)
        return self._step()

    def allow(self, count: int) -> None:
        self._permits.release(count)


@pytest.fixture
def generator(model):
    return make_generator(model)


@pytest.fixture
def worker(generator) -> Iterator[GenerationThread]:
    worker = GenerationThread(generator, max_queued_requests=8)
    worker.start()
    yield worker
    worker.stop(TIMEOUT)


@pytest.fixture
def steps(generator, monkeypatch) -> Iterator[GatedSteps]:
    gate = GatedSteps(generator)
    monkeypatch.setattr(generator, "step", gate)
    yield gate
    gate.allow(10_000)


def test_answers_come_through_futures(worker) -> None:
    futures = [worker.submit(make_task([1, 2], n, seed=n)) for n in (3, 5, 1)]
    assert [len(f.result(TIMEOUT).tokens) for f in futures] == [3, 5, 1]
    assert worker.stats().num_running == 0


def test_pause_takes_effect_within_one_step(worker, steps) -> None:
    running = worker.submit(make_task([1, 2], 100))
    steps.allow(3)
    wait_until(lambda: steps.num_started == 4, "fourth step", TIMEOUT)
    paused = worker.pause()  # while the fourth step is under way
    steps.allow(1)
    paused.result(TIMEOUT)
    answer = running.result(TIMEOUT)
    assert len(answer.tokens) == 4 and answer.finish.type == "abort"
    assert steps.num_started == 4


def test_pause_aborts_waiting_requests_and_holds_later_ones(model) -> None:
    generator = make_generator(model, max_batch_size=1)
    worker = GenerationThread(generator, 8)
    first, second = [worker.submit(make_task([1], 5, seed=i)) for i in range(2)]
    paused = worker.pause()
    worker.start()
    paused.result(TIMEOUT)
    for future in (first, second):
        finish = future.result(TIMEOUT).finish
        assert finish.type == "abort"
        assert finish.detail.startswith(ABORTED_BEFORE_PREFILL)
    later = worker.submit(make_task([1], 5))
    time.sleep(0.2)
    assert not later.done() and worker.stats().holds == ("paused",)
    worker.resume().result(TIMEOUT)
    assert len(later.result(TIMEOUT).tokens) == 5
    worker.stop(TIMEOUT)


def test_exclusive_operations_run_between_steps(worker, steps) -> None:
    running = worker.submit(make_task([1, 2], 100))
    steps.allow(2)
    wait_until(lambda: steps.num_started == 3, "third step", TIMEOUT)
    done = worker.run_exclusively(lambda: len(worker._generator.rows))
    steps.allow(1)
    assert done.result(TIMEOUT) == 0
    assert running.result(TIMEOUT).finish.type == "abort"


def test_an_exclusive_operation_that_fails_is_its_callers_problem(worker) -> None:
    def fail() -> None:
        raise ValueError("no such checkpoint")

    with pytest.raises(ValueError, match="no such checkpoint"):
        worker.run_exclusively(fail).result(TIMEOUT)
    assert len(worker.submit(make_task([1], 3)).result(TIMEOUT).tokens) == 3


def test_released_memory_holds_until_all_of_it_is_back(worker) -> None:
    calls: list[str] = []
    worker.release_memory(lambda: calls.append("release")).result(TIMEOUT)
    held = worker.submit(make_task([1], 3))
    worker.resume_memory(lambda: False).result(TIMEOUT)
    time.sleep(0.1)
    assert not held.done() and calls == ["release"]
    worker.resume_memory(lambda: True).result(TIMEOUT)
    assert len(held.result(TIMEOUT).tokens) == 3


def test_cancelled_requests_are_dropped(worker, steps) -> None:
    kept, dropped = [worker.submit(make_task([1], 6, seed=i)) for i in range(2)]
    steps.allow(1)
    wait_until(lambda: worker.stats().num_running == 2, "both running", TIMEOUT)
    assert dropped.cancel()
    steps.allow(2)
    wait_until(lambda: worker.stats().num_running == 1, "one dropped", TIMEOUT)
    steps.allow(20)
    assert len(kept.result(TIMEOUT).tokens) == 6


def test_the_queue_is_bounded(worker) -> None:
    worker.pause().result(TIMEOUT)
    futures = [worker.submit(make_task([1], 2, seed=i)) for i in range(8)]
    with pytest.raises(QueueFullError, match="max_queued_requests"):
        worker.submit(make_task([1], 2))
    futures[3].cancel()  # makes room
    last = worker.submit(make_task([1], 2))
    worker.resume().result(TIMEOUT)
    assert len(last.result(TIMEOUT).tokens) == 2


def test_a_failed_step_fails_its_requests_and_the_worker_goes_on(
    worker, generator, monkeypatch
) -> None:
    def broken():
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(generator, "step", broken)
        with pytest.raises(GenerationError, match="out of memory"):
            worker.submit(make_task([1], 3)).result(TIMEOUT)
    assert worker.is_alive
    assert len(worker.submit(make_task([1], 3)).result(TIMEOUT).tokens) == 3


def test_a_failed_prefill_fails_its_requests_only(
    worker, generator, steps, monkeypatch
) -> None:
    running = worker.submit(make_task([1], 6))
    steps.allow(1)
    wait_until(lambda: steps.num_started == 2, "second step", TIMEOUT)
    choose = generator._choose_pieces

    def broken():
        pieces, joining = choose()
        if pieces:
            raise RuntimeError("out of memory")
        return pieces, joining

    monkeypatch.setattr(generator, "_choose_pieces", broken)
    with pytest.raises(GenerationError, match="prefill failed"):
        future = worker.submit(make_task([1, 2], 3))
        steps.allow(20)
        future.result(TIMEOUT)
    assert len(running.result(TIMEOUT).tokens) == 6


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_fails_everybody_and_shows(generator, monkeypatch) -> None:
    worker = GenerationThread(generator, 8)

    def die(waiting):
        raise SystemError("cosmic ray")

    monkeypatch.setattr(generator, "drop", die)
    future = worker.submit(make_task([1], 3))
    worker.start()
    with pytest.raises(ThreadDeadError, match="cosmic ray"):
        future.result(TIMEOUT)
    assert not worker.is_alive
    with pytest.raises(ThreadDeadError, match="cosmic ray"):
        worker.submit(make_task([1], 3))


def test_stop_fails_what_is_left(generator) -> None:
    worker = GenerationThread(generator, 8)
    worker.start()
    worker.pause().result(TIMEOUT)
    future = worker.submit(make_task([1], 3))
    worker.stop(TIMEOUT)
    with pytest.raises(ThreadDeadError, match="shutting down"):
        future.result(TIMEOUT)
    assert not worker.is_alive
