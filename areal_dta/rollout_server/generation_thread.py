"""The thread that generates, and the queue in front of it.

All state of the batch belongs to this one thread. Everybody else talks to it through
futures: requests wait in a bounded queue, and control operations (pause, new weights,
release of memory) run between two steps, so none of them ever sees a half-done step.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_dta.rollout_server.answers import Answer, GenerationError, GenerationTask
from areal_dta.rollout_server.generation import BatchGenerator

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Why generation may stand still.
PAUSED = "paused"
MEMORY_RELEASED = "memory released"


class QueueFullError(RuntimeError):
    """The queue holds `max_queued_requests` already."""


class ThreadDeadError(RuntimeError):
    """The generation thread has ended; nothing will be generated any more."""


@dataclass(frozen=True, slots=True)
class ThreadStats:
    num_running: int
    num_waiting: int
    holds: tuple[str, ...]


class GenerationThread:
    """Runs a `BatchGenerator` in a thread of its own."""

    def __init__(self, generator: BatchGenerator, max_queued_requests: int) -> None:
        self._generator = generator
        self._max_queued_requests = max_queued_requests
        self._wakeup = threading.Condition()
        # Guarded by _wakeup:
        self._waiting: deque[tuple[Answer, Future[Answer]]] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._holds: set[str] = set()
        self._stopping = False
        self._dead: str | None = None
        # Only touched by the thread:
        self._running: dict[int, Future[Answer]] = {}
        self._thread = threading.Thread(
            target=self._run, name="generation", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Fail every request and end the thread, waiting at most `timeout_seconds`."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        self._thread.join(timeout_seconds)

    @property
    def is_alive(self) -> bool:
        """Whether requests will be answered."""
        return self._dead is None and self._thread.is_alive()

    def stats(self) -> ThreadStats:
        with self._wakeup:
            return ThreadStats(
                len(self._running), len(self._waiting), tuple(sorted(self._holds))
            )

    def submit(self, task: GenerationTask) -> Future[Answer]:
        """Queue a request. Cancelling the future drops it, also when it is running.

        Raises:
            QueueFullError: `max_queued_requests` wait already.
            ThreadDeadError: the thread has ended.
        """
        answer, future = Answer(task), Future[Answer]()
        with self._wakeup:
            self._check_alive()
            if len(self._waiting) >= self._max_queued_requests:
                self._forget_cancelled()
            if len(self._waiting) >= self._max_queued_requests:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait already; raise "
                    "max_queued_requests or send fewer at a time."
                )
            self._waiting.append((answer, future))
            self._wakeup.notify()
        return future

    def pause(self) -> Future[None]:
        """Abort what runs and what waits; hold what comes until `resume`.

        Running requests end with the tokens they have. AReaL's client sends both kinds
        again; they wait here, because refusing them would make the client spin.
        """

        def command() -> None:
            self._hold(PAUSED)
            self._abort_running()
            with self._wakeup:
                waiting, self._waiting = self._waiting, deque()
            for answer, future in waiting:
                answer.abort()
                _resolve(future, answer)

        return self._post(command)

    def resume(self) -> Future[None]:
        """Undo `pause`."""
        return self._post(lambda: self._unhold(PAUSED))

    def release_memory(self, release: Callable[[], None]) -> Future[None]:
        """Abort what runs, free the KV cache, call `release`, and hold what comes."""

        def command() -> None:
            self._hold(MEMORY_RELEASED)
            self._abort_running()
            self._generator.clear()
            release()

        return self._post(command)

    def resume_memory(self, resume: Callable[[], bool]) -> Future[None]:
        """Call `resume`, and go on when it says that all memory is back."""

        def command() -> None:
            if resume():
                self._unhold(MEMORY_RELEASED)

        return self._post(command)

    def run_exclusively(self, operation: Callable[[], T]) -> Future[T]:
        """Abort what runs, then run `operation` while nothing is generated.

        Cached prefixes are dropped: the operation may change what they depend on.
        """

        def command() -> T:
            self._abort_running()
            self._generator.drop_prefixes()
            return operation()

        return self._post(command)

    def _post(self, command: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._wakeup:
            self._check_alive()
            self._commands.append((command, future))
            self._wakeup.notify()
        return future

    def _check_alive(self) -> None:
        if self._dead is not None or self._stopping:
            raise ThreadDeadError(self._dead or "the server is shutting down.")

    def _forget_cancelled(self) -> None:
        self._waiting = deque(w for w in self._waiting if not w[1].cancelled())

    # -- the rest runs in the thread --

    def _run(self) -> None:
        reason = "the server is shutting down."
        try:
            while self._wait_for_work():
                self._run_commands()
                self._drop_cancelled()
                self._admit()
                self._step()
        except BaseException as error:  # reported to every caller and by /health
            reason = f"the generation thread has died: {error!r}"
            logger.exception("The generation thread has died.")
        finally:
            self._end(reason)

    def _wait_for_work(self) -> bool:
        """Block until there is something to do; False when the thread shall end."""
        with self._wakeup:
            self._wakeup.wait_for(
                lambda: (
                    self._stopping
                    or self._commands
                    or self._running
                    or (self._waiting and not self._holds)
                )
            )
            return not self._stopping

    def _run_commands(self) -> None:
        while True:
            with self._wakeup:
                if not self._commands:
                    return
                command, future = self._commands.popleft()
            try:
                result = command()
            except Exception as error:  # the caller's to report
                _fail(future, error)
            else:
                _resolve(future, result)

    def _drop_cancelled(self) -> None:
        gone = [r for r in self._generator.rows if self._running[id(r)].cancelled()]
        for answer in gone:
            del self._running[id(answer)]
        self._generator.drop(gone)

    def _admit(self) -> None:
        while True:
            with self._wakeup:
                self._forget_cancelled()
                if self._holds or not self._waiting:
                    return
                answer, future = self._waiting.popleft()
            try:
                is_admitted = bool(self._generator.admit([answer]))
            except Exception as error:
                logger.exception("A request could not be admitted.")
                _fail(future, GenerationError(f"the prefill failed: {error!r}"))
                continue
            if not is_admitted:
                with self._wakeup:
                    self._waiting.appendleft((answer, future))
                return
            self._running[id(answer)] = future

    def _step(self) -> None:
        if not self._running:
            return
        try:
            done = self._generator.step()
        except Exception as error:
            done = self._generator.drop_failed(error)
            logger.exception("A step failed; %d request(s) end with it.", len(done))
        self._finish(done)

    def _abort_running(self) -> None:
        self._finish(self._generator.abort_all())

    def _finish(self, answers: list[Answer]) -> None:
        for answer in answers:
            future = self._running.pop(id(answer))
            if answer.error is not None:
                _fail(future, GenerationError(answer.error))
            else:
                _resolve(future, answer)

    def _hold(self, reason: str) -> None:
        with self._wakeup:
            self._holds.add(reason)

    def _unhold(self, reason: str) -> None:
        with self._wakeup:
            self._holds.discard(reason)

    def _end(self, reason: str) -> None:
        """Fail every future: nobody may wait for an answer that will not come."""
        with self._wakeup:
            self._dead = reason
            commands, self._commands = self._commands, deque()
            waiting, self._waiting = self._waiting, deque()
        running, self._running = self._running, {}
        futures = [f for _, f in commands] + [f for _, f in waiting]
        for future in futures + list(running.values()):
            _fail(future, ThreadDeadError(reason))


def _resolve(future: Future[T], result: T) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled by its caller
        future.set_result(result)


def _fail(future: Future[Any], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled by its caller
        future.set_exception(error)
