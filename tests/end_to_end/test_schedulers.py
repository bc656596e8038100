"""Runs that Slurm or a Ray cluster places leave no job behind, however they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from areal_dta.processes.slurm_jobs import JOBS_FILE
from tests.end_to_end.running import RunningLaunch
from tests.end_to_end.slurm_cluster import queued, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = "total_train_steps=3"
MANY_STEPS = "total_train_steps=100"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as settings:
        yield settings


def slurm_run(folder: Path, *overrides: str) -> RunningLaunch:
    return RunningLaunch(
        folder, "scheduler=slurm", "launch.loopback=true", *overrides, timeouts=600
    )


def wait_until_no_job(slurm: Path, run: RunningLaunch, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    record = run.run_dir / JOBS_FILE  # goes once Slurm has no job of it
    while (left := queued(slurm)) or record.exists():
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
    run.wait_until_empty()


def test_slurm_trains(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    with slurm_run(tmp_path, STEPS) as run:
        run.wait_for_step(1, timeout_seconds=600)
        assert len(queued(slurm)) == 2
        assert run.wait(timeout_seconds=400) == 0, run.text()
        wait_until_no_job(slurm, run)
    assert len(run.metrics()) == 3


@pytest.mark.parametrize("killed", ["launcher", "job"])
def test_slurm_killed_in_the_middle(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    with slurm_run(tmp_path, MANY_STEPS) as run:
        run.wait_for_step(1, timeout_seconds=600)
        if killed == "launcher":
            run.process.kill()
        else:
            run.find("areal_dta.startup.train_process").kill()
        run.wait(timeout_seconds=120)
        wait_until_no_job(slurm, run)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def wait_until_free(cluster: Cluster, cpus: float, seconds: float = 60.0) -> None:
    """Wait until no actor holds a CPU of the cluster."""
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        deadline = time.monotonic() + seconds
        while ray.available_resources().get("CPU", 0.0) < cpus:
            assert time.monotonic() < deadline, ray.available_resources()
            time.sleep(0.5)
    finally:
        ray.shutdown()


@pytest.mark.parametrize("ending", ["done", "killed"])
def test_ray_cluster_of_two_nodes(
    tmp_path: Path, two_nodes: Cluster, ending: str
) -> None:
    """One CPU each: actor and rollout worker are on different nodes."""
    steps = STEPS if ending == "done" else MANY_STEPS
    with RunningLaunch(tmp_path, "scheduler=ray", steps, timeouts=600) as run:
        run.wait_for_step(1, timeout_seconds=600)
        if ending == "done":
            assert run.wait(timeout_seconds=400) == 0, run.text()
            assert len(run.metrics()) == 3
        else:
            run.process.kill()
        run.wait_until_empty(timeout_seconds=60.0)
        wait_until_free(two_nodes, cpus=2.0)
