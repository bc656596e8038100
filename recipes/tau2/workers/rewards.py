"""Rewards from tau2's evaluator, in processes of their own.

An evaluation takes 0.1 to 0.7 seconds of pure Python: in the process that plays the
episodes it would stop all of them. Nothing that an episode contains may end the run: an
exception, a time-out or a crash of the evaluator is counted and gives reward 0.
"""

from __future__ import annotations

import asyncio
import queue
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from recipes.tau2.workers.process import WorkerPool, WorkerProcess


@dataclass(frozen=True, slots=True)
class Reward:
    """Reward of one episode."""

    value: float
    error: str | None = None
    """Why there is no verdict: then the value is 0."""


class RewardPool(WorkerPool):
    """A few processes that evaluate."""

    def __init__(self, num_processes: int, timeout_seconds: float = 60.0) -> None:
        """
        Args:
            timeout_seconds: of one evaluation, its wait for a process not included.
        """
        super().__init__(num_processes)
        self._timeout_seconds = timeout_seconds
        self._threads = ThreadPoolExecutor(num_processes, "tau2-reward")
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self.counts: Counter[str] = Counter()
        """Evaluations: "ok", "exception", "timeout", "crash"."""

    async def score(self, request: dict[str, Any]) -> Reward:
        """Evaluate an episode, given as `Episode.scoring_request`.

        Never raises because of the episode.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._score, request)

    def close(self) -> None:
        """End the processes; evaluations in progress end as crashes."""
        super().close()
        self._threads.shutdown(wait=True, cancel_futures=True)

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
