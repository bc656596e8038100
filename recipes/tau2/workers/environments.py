"""Environments in processes of their own, for domains with large databases.

An airline database is a hundred thousand Python objects, and each episode needs its
own. Many of them in the process that plays the episodes would stop its event loop for
seconds: while they are parsed, and whenever Python's garbage collector walks them all.
"""

from __future__ import annotations

import itertools
from typing import Any

from recipes.tau2.api import Environment, ToolCall, ToolMessage, registry
from recipes.tau2.domains import Domain
from recipes.tau2.workers.process import WorkerPool, WorkerProcess

LARGE_DATABASES = ("airline", "retail")
_CALL_SECONDS = 60.0


class EnvironmentLostError(RuntimeError):
    """The process that held the environment has ended; the episode has no result."""


def build_environment(domain: Domain) -> Environment:
    """Build a fresh environment in this process, its database read anew."""
    constructor = registry.get_env_constructor(domain.tau2_name)
    return constructor(solo_mode=True) if domain.solo else constructor()


class EnvironmentPool(WorkerPool):
    """Hands out environments, in turn from each process."""

    def __init__(self, num_processes: int) -> None:
        super().__init__(num_processes)
        self._ids = itertools.count()

    def make(self, domain: Domain, task_id: str) -> RemoteEnvironment:
        """Return an environment for one episode of a task.

        Cheap: the environment is built when tau2 sets its state.
        """
        environment_id = next(self._ids)
        process = self._processes[environment_id % len(self._processes)]
        return RemoteEnvironment(process, environment_id, domain, task_id)


class RemoteEnvironment:
    """The part of an environment that tau2's orchestrator uses. Its methods block."""

    def __init__(
        self, process: WorkerProcess, environment_id: int, domain: Domain, task_id: str
    ) -> None:
        self.solo_mode = domain.solo
        self._process = process
        self._id = environment_id
        self._domain = domain
        self._task_id = task_id
        self._generation: int | None = None

    def set_state(self, **state: Any) -> None:
        """Build it in the task's initial state, which is what tau2 passes.

        Raises:
            EnvironmentLostError: the process has ended.
        """
        self._ask("open", domain=self._domain.name, task_id=self._task_id)
        self._generation = self._process.generation

    def sync_tools(self) -> None:
        """Do nothing: an environment syncs its tools itself after each call."""

    def get_response(self, call: ToolCall) -> ToolMessage:
        """Carry out a tool call.

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
        request = {"op": operation, "environment": self._id, **arguments}
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
