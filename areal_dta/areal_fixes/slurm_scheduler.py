"""AReaL's Slurm scheduler with bounded waits, and settings that it leaves out.

`registry` has the faults and their remedies (``slurm_scheduler``).
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from areal.api.cli_args import SchedulingSpec
from areal.infra.scheduler.exceptions import WorkerFailedError, WorkerTimeoutError
from areal.infra.scheduler.slurm import SlurmScheduler, SlurmWorkerInfo
from areal.infra.utils.launcher import JobState


class BoundedSlurmScheduler(SlurmScheduler):
    """Slurm scheduler that heeds the scheduling specification and ends its waits.

    Args:
        comment: comment of every job, by which `squeue` finds those of the run.
        on_job: called with the id of each job that has been submitted.
        startup_timeout: seconds that workers may take from submission to readiness,
            the wait in Slurm's queue included.
    """

    def __init__(
        self,
        exp_config: Any,
        comment: str,
        on_job: Callable[[int], None],
        startup_timeout: float,
    ) -> None:
        super().__init__(exp_config=exp_config, startup_timeout=startup_timeout)
        # AReaL divides by it, also for workers that ask for none.
        self._n_gpus_per_node = max(1, exp_config.cluster.n_gpus_per_node)
        self._comment = comment
        self._on_job = on_job

    def create_workers(self, job: Any, *args: Any, **kwargs: Any) -> list[str]:
        before = set(self._jobs.values())
        workers = super().create_workers(job, *args, **kwargs)
        for job_id in set(self._jobs.values()) - before:
            self._on_job(job_id)
        return list(workers)

    def _generate_sbatch_script(
        self, *args: Any, schedulings: list[SchedulingSpec], **kwargs: Any
    ) -> str:
        spec = schedulings[0]
        # AReaL takes these three from its constructor, where no configuration reaches.
        self.container_type = spec.container_type
        self.container_mounts = spec.mount
        self.srun_additional_args = spec.srun_additional_args
        if spec.container_type != "apptainer":
            # AReaL hands environment variables to containers alone.
            commands = [*_exports(spec.env_vars), *(spec.additional_bash_cmds or [])]
            spec = dataclasses.replace(spec, additional_bash_cmds=commands)
        script = super()._generate_sbatch_script(
            *args, schedulings=[spec, *schedulings[1:]], **kwargs
        )
        first, rest = script.split("\n", 1)
        return f"{first}\n#SBATCH --comment={shlex.quote(self._comment)}\n{rest}"

    def _check_job_status(self, role: str) -> None:
        try:
            super()._check_job_status(role)
        except KeyError:
            # Slurm has states for which AReaL has no word (CONFIGURING, SUSPENDED, …).
            # A job that has ended in one of them is gone from the queue soon after.
            return
        job_id = self._jobs.get(role)
        state, _ = self._job_status_cache.get(job_id, (None, 0.0))
        if state == JobState.COMPLETED:  # reached its time limit; AReaL goes on waiting
            log = self._read_log_tail(role)
            raise WorkerFailedError(f"{role}/*", 0, f"job {job_id} has ended\n{log}")

    def _configure_worker(self, worker_info: SlurmWorkerInfo, worker_rank: int) -> None:
        deadline = time.monotonic() + self.startup_timeout
        while not self._is_worker_ready(worker_info):
            self._check_job_status(worker_info.role)
            if time.monotonic() > deadline:
                raise WorkerTimeoutError(worker_info.worker.id, self.startup_timeout)
            time.sleep(0.1)
        super()._configure_worker(worker_info, worker_rank)


def _exports(env_vars: dict[str, str] | None) -> list[str]:
    """Return shell commands for the environment of a worker outside a container."""
    bin_dir = os.path.dirname(sys.executable)  # of this environment's `python`
    return [
        f"export PATH={shlex.quote(bin_dir)}:$PATH",
        *(f"export {k}={shlex.quote(str(v))}" for k, v in (env_vars or {}).items()),
    ]
