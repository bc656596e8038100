"""What we change in how AReaL starts, addresses and updates its processes."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from areal.api import Job
from areal.api.cli_args import NameResolveConfig, SchedulingSpec
from areal.infra.scheduler.exceptions import WorkerFailedError, WorkerTimeoutError
from areal.utils import name_resolve, names

from areal_dta.areal_fixes.loopback import LOOPBACK, use_loopback
from areal_dta.areal_fixes.weight_sync import load_when_saved
from areal_dta.config.schema import DTAGRPOConfig, to_structured
from areal_dta.processes.scheduler import BoundedLocalScheduler
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


class TestScheduler:
    def test_a_worker_that_dies_while_it_starts(
        self, scheduler: BoundedLocalScheduler
    ) -> None:
        with pytest.raises(WorkerFailedError, match="no such luck"):
            scheduler.create_workers(
                job("import time; time.sleep(0.5); print('no such luck')")
            )

    def test_a_worker_that_never_comes_up(
        self, scheduler: BoundedLocalScheduler
    ) -> None:
        with pytest.raises(WorkerTimeoutError):
            scheduler.create_workers(job("import time; time.sleep(60)"))
        (process,) = scheduler.worker_processes().values()
        assert "time.sleep(60)" in process.cmdline()[2]
        scheduler.delete_workers()
        assert not process.is_running()

    def test_ports_do_not_follow_the_seed(
        self, scheduler: BoundedLocalScheduler
    ) -> None:
        drawn = []
        for _ in range(3):
            random.seed(1)
            drawn.append(tuple(scheduler._allocate_ports(4)))
            assert random.random() == random.Random(1).random()
            scheduler._allocated_ports.clear()
        assert len(set(drawn)) == 3


class TestLoopback:
    def test_everybody_sees_it_until_it_is_undone(self) -> None:
        import areal.infra.controller.rollout_controller as controller
        import areal.infra.scheduler.local as scheduler
        import areal.utils.network as network

        original = network.gethostip
        undo = use_loopback()
        try:
            addresses = [m.gethostip() for m in (network, controller, scheduler)]
            assert addresses == [LOOPBACK] * 3
        finally:
            undo()
        assert controller.gethostip is scheduler.gethostip is original

    def test_an_unknown_version_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = sys.modules["areal_dta.areal_fixes.loopback"]
        monkeypatch.setattr(module, "version", lambda name: "2.0.0")
        with pytest.raises(RuntimeError, match="found 2.0.0"):
            use_loopback()


class TestWeightSync:
    def test_updates_wait_for_the_checkpoint(self, tmp_path: Path) -> None:
        name_resolve.reconfigure(
            NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path))
        )
        updates: list[tuple[str, float]] = []

        async def update(meta: Any) -> None:
            updates.append((meta, time.monotonic()))

        controller: Any = SimpleNamespace(
            config=SimpleNamespace(experiment_name="e", trial_name="t"),
            get_version=lambda: 4,
            update_weights_from_disk=update,
        )
        load_when_saved(controller)
        saved: list[float] = []

        def save() -> None:
            saved.append(time.monotonic())
            name_resolve.add(names.update_weights_from_disk("e", "t", 4), "1.0")

        timer = threading.Timer(0.3, save)
        timer.start()
        asyncio.run(controller.update_weights_from_disk("meta"))
        timer.join()
        ((meta, loaded_at),) = updates
        assert meta == "meta"
        assert loaded_at >= saved[0]
