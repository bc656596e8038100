"""Rewards from tau2's evaluator, in processes of their own.

An evaluation takes 0.1 to 0.7 seconds of pure Python: in the process that plays the
episodes it would stop all of them. Nothing that an episode contains may end the run: an
exception, a time-out or a crash of the evaluator is counted and gives reward 0.
"""

from __future__ import annotations

import asyncio
import json
import queue
import selectors
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from recipes.tau2.episode import Episode

_START_SECONDS = 300.0  # tau2 takes ten seconds to import, more on a busy machine


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
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._processes = [_Process() for _ in range(num_processes)]
        for process in self._processes:
            self._idle.put(process)
        self.counts: Counter[str] = Counter()
        """Evaluations: "ok", "exception", "timeout", "crash"."""

    async def score(self, episode: Episode) -> Reward:
        """The reward of an episode. Never raises on its account."""
        request = {
            "domain": episode.domain,
            "task_id": episode.task_id,
            "termination": episode.termination,
            "messages": [m.model_dump(mode="json") for m in episode.messages],
        }
        return await self.score_request(request)

    async def score_request(self, request: dict[str, Any]) -> Reward:
        """The same, of an episode as `scoring_worker` takes it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._score, request)

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
            process.kill()
            limit = f"{self._timeout_seconds:g} s"
            return self._failed("timeout", f"the evaluation took more than {limit}")
        except (OSError, EOFError, ValueError) as error:
            process.kill()
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


class _Process:
    """One `scoring_worker`, started when asked and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """
        Raises:
            TimeoutError: no answer in time.
            OSError, EOFError, ValueError: the process has ended or was ended.
        """
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return _read_line(process, timeout_seconds)

    def kill(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unsent data of a dead process
                    continue

    def _running(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._process is not None:
                return self._process
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "recipes.tau2.scoring_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
        _read_line(process, _START_SECONDS)
        return process


def _read_line(process: subprocess.Popen[str], timeout_seconds: float) -> Any:
    """One answer. The worker writes whole lines, so the first byte is enough to wait
    for."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(timeout_seconds):
            raise TimeoutError
    line = process.stdout.readline()
    if not line:
        raise EOFError(f"exit code {process.wait(timeout=10)}")
    return json.loads(line)
