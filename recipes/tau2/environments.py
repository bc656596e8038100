"""Environments in processes of their own, for domains with large databases.

An airline database is a hundred thousand Python objects, and each episode needs its
own. Many of them in the process that plays the episodes would stop its event loop for
seconds: while they are parsed, and whenever Python's garbage collector walks them all.
"""

from __future__ import annotations

import itertools
from typing import Any

from recipes.tau2.api import ToolCall, ToolMessage
from recipes.tau2.domains import Domain
from recipes.tau2.worker_process import WorkerProcess

LARGE_DATABASES = ("airline", "retail")
_CALL_SECONDS = 60.0


class EnvironmentLostError(RuntimeError):
    """The process that held the environment has ended; the episode has no result."""


class EnvironmentPool:
    """Hands out environments; `close` it. Processes start when they are needed."""

    def __init__(self, num_processes: int) -> None:
        if num_processes < 1:
            raise ValueError(f"num_processes={num_processes}; expected at least 1")
        self._processes = [WorkerProcess() for _ in range(num_processes)]
        self._numbers = itertools.count()

    def make(self, domain: Domain, task_id: str) -> RemoteEnvironment:
        """An environment for one episode of a task. Cheap: it is built when tau2 sets
        its state."""
        number = next(self._numbers)
        process = self._processes[number % len(self._processes)]
        return RemoteEnvironment(process, number, domain, task_id)

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RemoteEnvironment:
    """What tau2's orchestrator uses of an environment. Its methods block."""

    def __init__(
        self, process: WorkerProcess, number: int, domain: Domain, task_id: str
    ) -> None:
        self.solo_mode = domain.solo
        self._process = process
        self._number = number
        self._domain = domain
        self._task_id = task_id
        self._generation: int | None = None

    def set_state(self, **state: Any) -> None:
        """Builds it in the task's initial state, which is what tau2 passes.

        Raises:
            EnvironmentLostError: the process has ended.
        """
        self._ask("open", domain=self._domain.name, task_id=self._task_id)
        self._generation = self._process.generation

    def sync_tools(self) -> None:
        """Nothing to do: an environment does so itself after each call."""

    def get_response(self, call: ToolCall) -> ToolMessage:
        """Carries out a tool call.

        Raises:
            EnvironmentLostError: the process has ended, or took too long.
        """
        answer = self._ask("call", call=call.model_dump(mode="json"))
        return ToolMessage(**answer["message"])

    def close(self) -> None:
        """Forget it; no error if it is gone."""
        if self._generation != self._process.generation:
            return
        try:
            self._ask("close")
        except EnvironmentLostError:
            return

    def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        request = {"op": operation, "environment": self._number, **arguments}
        try:
            answer = self._process.ask(request, _CALL_SECONDS)
        except TimeoutError as error:
            raise EnvironmentLostError(
                f"{self._domain.name} task {self._task_id}: {operation} took more than "
                f"{_CALL_SECONDS:g} s"
            ) from error
        except (OSError, EOFError, ValueError) as error:
            raise EnvironmentLostError(
                f"the process of {self._domain.name} environments ended ({error})"
            ) from error
        if "error" in answer:
            raise EnvironmentLostError(answer["error"])
        return answer
