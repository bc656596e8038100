"""AReaL's local scheduler with bounded waits and ports that do not repeat.

`registry` has the fault and its remedy (``local_scheduler``).
"""

from __future__ import annotations

import random
import time
from typing import Any

import psutil
from areal.infra.scheduler.exceptions import (
    WorkerCreationError,
    WorkerFailedError,
    WorkerTimeoutError,
)
from areal.infra.scheduler.local import LocalScheduler, WorkerInfo


class BoundedLocalScheduler(LocalScheduler):
    """Local scheduler that raises when a starting worker dies or stays silent.

    AReaL polls a new worker's health without a time-out and without looking whether
    its process is alive.
    """

    def worker_processes(self) -> dict[str, psutil.Process]:
        """Return the process of each worker by the worker's id.

        AReaL holds the shell that also runs the worker's log pipeline.
        """
        found = {}
        for workers in self._workers.values():
            for worker in workers:
                if worker.process is None:  # forked by another worker
                    continue
                for child in psutil.Process(worker.process.pid).children():
                    if "--worker-index" in child.cmdline():
                        found[worker.worker.id] = child
        return found

    def fork_workers(
        self, role: str, target_role: str, command: str | None = None
    ) -> list[str]:
        """Fork workers as AReaL does.

        Raises:
            WorkerCreationError: with the end of the worker's log, which AReaL leaves
                out.
        """
        try:
            return super().fork_workers(role, target_role, command)
        except WorkerCreationError as e:
            log = self._read_log_tail(str(self.log_dir / f"{role}.log"))
            raise WorkerCreationError(role, f"{e}", log) from e

    async def _wait_for_fork_ready(  # AReaL waits 60 s; a busy machine takes longer
        self, session: Any, host: str, port: int, timeout: float | None = None
    ) -> bool:
        limit = timeout or self.startup_timeout
        ready = super()._wait_for_fork_ready(session, host, port, limit)
        return bool(await ready)

    def _allocate_ports(self, count: int) -> list[int]:
        # AReaL draws ports from the generator that the trainer seeds, so two runs with
        # one seed would draw the same ones, seconds before either listens on them.
        state = random.getstate()
        random.seed()
        try:
            return super()._allocate_ports(count)
        finally:
            random.setstate(state)

    def _configure_worker(self, worker_info: WorkerInfo, worker_rank: int) -> None:
        deadline = time.monotonic() + self.startup_timeout
        while not self._is_worker_ready(worker_info):
            process = worker_info.process
            if process is not None and process.poll() is not None:
                raise WorkerFailedError(
                    worker_info.worker.id,
                    process.returncode,
                    self._read_log_tail(worker_info.log_file),
                )
            if time.monotonic() > deadline:
                raise WorkerTimeoutError(worker_info.worker.id, self.startup_timeout)
            time.sleep(0.1)
        super()._configure_worker(worker_info, worker_rank)
