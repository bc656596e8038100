"""AReaL's Slurm scheduler with its settings heeded and its waits bounded."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from areal.api import Job
from areal.api.cli_args import (
    BaseExperimentConfig,
    ClusterSpecConfig,
    NameResolveConfig,
    SchedulingSpec,
)
from areal.infra.scheduler.exceptions import WorkerFailedError, WorkerTimeoutError
from areal.infra.scheduler.slurm import SlurmScheduler
from areal.infra.utils.launcher import JobState

from areal_dta.areal_fixes.slurm_scheduler import BoundedSlurmScheduler

SPEC = SchedulingSpec(
    cpu=2,
    gpu=0,
    mem=1,
    cmd="python -m worker",
    container_type="none",
    srun_additional_args="--kill-on-bad-exit",
    env_vars={"ONE": "a b"},
    additional_bash_cmds=["module load it"],
)


def slurm_config(folder: Path, n_gpus_per_node: int) -> BaseExperimentConfig:
    (folder / "names").mkdir(exist_ok=True)
    names = NameResolveConfig(type="nfs", nfs_record_root=str(folder / "names"))
    cluster = ClusterSpecConfig(
        name_resolve=names,
        fileroot=str(folder),
        n_gpus_per_node=n_gpus_per_node,
    )
    return BaseExperimentConfig(
        experiment_name="e", trial_name="t", total_train_epochs=1, cluster=cluster
    )


def sbatch_script(scheduler: SlurmScheduler, spec: SchedulingSpec = SPEC) -> str:
    return scheduler._generate_sbatch_script(
        role="actor",
        replicas=1,
        nodes=1,
        total_gpus=0,
        cpus_per_task=2,
        mem_per_task=1024,
        schedulings=[spec],
        nodelist=None,
        exclude=None,
    )


@pytest.fixture
def scheduler(tmp_path: Path) -> BoundedSlurmScheduler:
    config = slurm_config(tmp_path, n_gpus_per_node=0)
    return BoundedSlurmScheduler(config, "areal_dta:run1", print, startup_timeout=0.3)


def test_script_follows_the_specification(scheduler: BoundedSlurmScheduler) -> None:
    script = sbatch_script(scheduler)
    assert "singularity" not in script and "pmi2" not in script
    assert "srun --kill-on-bad-exit " in script
    assert "\n#SBATCH --comment=areal_dta:run1\n" in script
    exported = script.index("ONE='\"'\"'a b'\"'\"'")  # quoted for bash -c '...'
    assert exported < script.index("module load it") < script.index("-m worker")
    assert SPEC.additional_bash_cmds == ["module load it"]
    # bash accepts it, and the directives come before the first command
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    lines = script.splitlines()
    first_command = next(i for i, line in enumerate(lines) if line[:1] not in ("#", ""))
    assert all("#SBATCH" not in line for line in lines[first_command:])


def test_containers_stay_areals(scheduler: BoundedSlurmScheduler) -> None:
    spec = SchedulingSpec(cpu=2, image="image.sif", mount="/data:/data")
    script = sbatch_script(scheduler, spec)
    assert "singularity exec" in script and "--bind /data:/data" in script
    assert " image.sif " in script


def submitted(
    scheduler: BoundedSlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_output(command: list[str], **kwargs: object) -> bytes:
        assert command[0] == "sbatch"
        return b"Submitted batch job 7\n"

    monkeypatch.setattr(subprocess, "check_output", check_output)
    scheduler.create_workers(Job(replicas=1, tasks=[SPEC], role="actor"))


def test_ids_are_recorded(
    scheduler: BoundedSlurmScheduler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    submitted(scheduler, monkeypatch)
    assert capsys.readouterr().out.split() == ["7"]


def test_silent_worker_is_not_waited_for(
    scheduler: BoundedSlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(scheduler, monkeypatch)
    scheduler._job_status_cache[7] = (JobState.RUNNING, time.time())
    with pytest.raises(WorkerTimeoutError):
        scheduler._configure_worker(scheduler._workers["actor"][0], 0)


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED])
def test_job_that_has_ended(
    scheduler: BoundedSlurmScheduler, monkeypatch: pytest.MonkeyPatch, state: JobState
) -> None:
    submitted(scheduler, monkeypatch)
    scheduler._job_status_cache[7] = (state, time.time())
    with pytest.raises(WorkerFailedError):
        scheduler._check_job_status("actor")


def test_state_that_areal_does_not_know(
    scheduler: BoundedSlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(scheduler, monkeypatch)
    row = "__PSI__".join(["7", "CONFIGURING", "", "", "e_t:actor", "", "me"])
    reply = f"HEADER\n{row}".encode()
    monkeypatch.setattr(subprocess, "check_output", lambda *a, **k: reply)
    scheduler._check_job_status("actor")
