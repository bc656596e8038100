"""AReaL's local scheduler with bounded waits and ports that do not repeat."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from areal.api import Job
from areal.api.cli_args import SchedulingSpec
from areal.infra.scheduler.exceptions import WorkerFailedError, WorkerTimeoutError

from areal_dta.areal_fixes.local_scheduler import BoundedLocalScheduler
from areal_dta.config.schema import DTAGRPOConfig, to_structured
from areal_dta.startup.compose import compose, find_config

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DTAGRPOConfig:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "name_resolve").mkdir(parents=True)
    return to_structured(compose(find_config("gsm8k_grpo"), ["hardware=cpu"]))


@pytest.fixture
def scheduler(config: DTAGRPOConfig) -> Iterator[BoundedLocalScheduler]:
    scheduler = BoundedLocalScheduler(exp_config=config, startup_timeout=3.0)
    yield scheduler
    scheduler.delete_workers()


def job(code: str) -> Job:
    spec = SchedulingSpec(cpu=1, gpu=0, mem=1, cmd=f'python -c "{code}"')
    return Job(replicas=1, tasks=[spec], role="actor")


def test_a_worker_that_dies_while_it_starts(scheduler: BoundedLocalScheduler) -> None:
    with pytest.raises(WorkerFailedError, match="no such luck"):
        scheduler.create_workers(
            job("import time; time.sleep(0.5); print('no such luck')")
        )


def test_a_worker_that_never_comes_up(scheduler: BoundedLocalScheduler) -> None:
    with pytest.raises(WorkerTimeoutError):
        scheduler.create_workers(job("import time; time.sleep(60)"))
    (process,) = scheduler.worker_processes().values()
    assert "time.sleep(60)" in process.cmdline()[2]
    scheduler.delete_workers()
    assert not process.is_running()


def test_ports_do_not_follow_the_seed(scheduler: BoundedLocalScheduler) -> None:
    drawn = []
    for _ in range(3):
        random.seed(1)
        drawn.append(tuple(scheduler._allocate_ports(4)))
        assert random.random() == random.Random(1).random()
        scheduler._allocated_ports.clear()
    assert len(set(drawn)) == 3
