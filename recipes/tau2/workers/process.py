"""Child processes that answer JSON lines, restarted when one has died or was ended."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any, Self

_START_SECONDS = 300.0  # tau2 takes ten seconds to import, more on a busy machine


class WorkerProcess:
    """One `workers.worker`, started when it is first asked. Thread-safe."""

    def __init__(self) -> None:
        self.generation = 0
        """Number of starts so far; each start forgets what the process held."""
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # of the two above
        self._turn = threading.Lock()  # one question at a time

    def ask(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Send a request, and wait for the answer.

        Raises:
            TimeoutError: no answer in time; the process is ended.
            OSError, EOFError, ValueError: it has ended.
        """
        with self._turn:
            try:
                process = self._running()
                assert process.stdin is not None
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                answer: dict[str, Any] = _read_line(process, timeout_seconds)
                return answer
            except (TimeoutError, OSError, EOFError, ValueError):
                self.kill()
                raise

    def kill(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            # Its context closes the pipes and waits; a dead process leaves unsent data.
            with suppress(OSError), process:
                process.kill()

    def _running(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._process is not None:
                return self._process
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "recipes.tau2.workers.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
            self.generation += 1
        _read_line(process, _START_SECONDS)
        return process


def _read_line(process: subprocess.Popen[str], timeout_seconds: float) -> Any:
    # The worker writes whole lines, so the first byte is enough to wait for.
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(timeout_seconds):
            raise TimeoutError
    line = process.stdout.readline()
    if not line:
        raise EOFError(f"exit code {process.wait(timeout=10)}")
    return json.loads(line)


class WorkerPool:
    """Processes that start when they are needed; a context manager, or `close` it."""

    def __init__(self, num_processes: int) -> None:
        if num_processes < 1:
            raise ValueError(f"num_processes={num_processes}; expected at least 1")
        self._processes = [WorkerProcess() for _ in range(num_processes)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
