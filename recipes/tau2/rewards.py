"""Rewards from tau2's evaluator, in processes of their own.

An evaluation takes 0.1 to 0.7 seconds of pure Python: in the process that plays the
episodes it would stop all of them. Nothing that an episode contains may end the run: an
exception, a time-out or a crash of the evaluator is counted and gives reward 0.
"""

from __future__ import annotations

import asyncio
import queue
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from recipes.tau2.episode import Episode
from recipes.tau2.worker_process import WorkerProcess


@dataclass(frozen=True, slots=True)
class Reward:
    """Of one episode."""

    value: float
    error: str | None = None
    """Why there is no verdict: then the value is 0."""


class RewardPool:
    """A few evaluating processes; use as a context manager, or `close` it.

    They start when they are first needed.
    """

    def __init__(self, num_processes: int, timeout_seconds: float = 60.0) -> None:
        """
        Args:
            timeout_seconds: of one evaluation, its wait for a process not included.
        """
        if num_processes < 1:
            raise ValueError(f"num_processes={num_processes}; expected at least 1")
        self._timeout_seconds = timeout_seconds
        self._threads = ThreadPoolExecutor(num_processes, "tau2-reward")
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._processes = [WorkerProcess() for _ in range(num_processes)]
        for process in self._processes:
            self._idle.put(process)
        self.counts: Counter[str] = Counter()
        """Evaluations: "ok", "exception", "timeout", "crash"."""

    async def score(self, episode: Episode) -> Reward:
        """The reward of an episode. Never raises on its account."""
        return await self._off_loop(lambda: self._score(_request(episode)))

    async def score_request(self, request: dict[str, Any]) -> Reward:
        """The same, of an episode as `scoring_worker` takes it."""
        return await self._off_loop(lambda: self._score(request))

    async def _off_loop(self, call: Callable[[], Reward]) -> Reward:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """End the processes; evaluations that run end as crashes."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _score(self, request: dict[str, Any]) -> Reward:
        process = self._idle.get_nowait()  # as many threads as processes
        try:
            answer = process.ask(request, self._timeout_seconds)
        except TimeoutError:
            limit = f"{self._timeout_seconds:g} s"
            return self._failed("timeout", f"the evaluation took more than {limit}")
        except (OSError, EOFError, ValueError) as error:
            return self._failed("crash", f"the evaluating process ended ({error})")
        finally:
            self._idle.put(process)
        if "error" in answer:
            return self._failed("exception", answer["error"])
        self.counts["ok"] += 1
        return Reward(float(answer["reward"]))

    def _failed(self, kind: str, error: str) -> Reward:
        self.counts[kind] += 1
        return Reward(0.0, f"{kind}: {error}")


def _request(episode: Episode) -> dict[str, Any]:
    return {
        "domain": episode.domain,
        "task_id": episode.task_id,
        "termination": episode.termination,
        "messages": [m.model_dump(mode="json") for m in episode.messages],
    }
