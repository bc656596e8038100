"""However a run ends, it says so in its exit code and leaves no process behind."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from areal_dta.embedded import tiny_model_path
from tests.end_to_end.running import RunningLaunch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

WORKER = ("areal_dta.areal_fixes.loopback", "--role")
SERVER = ("areal_dta.rollout_server.server",)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_signal_to_the_launcher(tmp_path: Path, number: int, exit_code: int) -> None:
    with RunningLaunch(tmp_path) as run:
        run.wait_for_step(2)
        run.process.send_signal(number)
        assert run.wait() == exit_code
        assert run.processes() == []
        assert (run.run_dir / "reward.png").exists()
        assert len(run.metrics()) >= 2


def test_ctrl_c_while_workers_start(tmp_path: Path) -> None:
    with RunningLaunch(tmp_path) as run:
        while "starting dta:d1" not in run.text():
            assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.processes() == []


def test_failure_while_workers_start(tmp_path: Path) -> None:
    model = tmp_path / "model"  # passes the checks, but has no weights
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(tiny_model_path(), model, ignore=ignore)
    with RunningLaunch(tmp_path, f"actor.path={model}") as run:
        assert run.wait(timeout_seconds=240) == 1
        assert run.processes() == []
        errors = [line for line in run.text().splitlines() if line.startswith("error:")]
        assert len(errors) == 1
        assert not (run.run_dir / "reward.png").exists()


def test_no_progress_is_not_waited_for(tmp_path: Path) -> None:
    # A time-out that the start-up of four processes cannot meet.
    with RunningLaunch(tmp_path, "launch.startup_timeout_seconds=2") as run:
        assert run.wait(timeout_seconds=240) == 1
        assert run.processes() == []
        assert "error: no progress: waited 2 s for the first step" in run.text()


def test_kill_minus_nine_of_the_launcher(tmp_path: Path) -> None:
    with RunningLaunch(tmp_path) as run:
        run.wait_for_step(1)
        assert len(run.processes()) >= 4
        run.process.kill()
        run.wait()
        run.wait_until_empty()


def test_kill_minus_nine_of_launcher_and_trainer(tmp_path: Path) -> None:
    with RunningLaunch(tmp_path) as run:
        run.wait_for_step(1)
        job = run.find("areal_dta.startup.train_process")
        os.kill(run.process.pid, signal.SIGKILL)
        os.kill(job.pid, signal.SIGKILL)
        run.wait()
        run.wait_until_empty()


@pytest.mark.parametrize(
    ("victim", "named"),
    [
        (("areal_dta.startup.train_process",), "SIGKILL"),
        ((*WORKER, "actor"), "actor/0"),
        ((*WORKER, "rollout"), "rollout"),
        (SERVER, "rollout server 0"),
    ],
)
def test_death_of_one_process(
    tmp_path: Path, victim: tuple[str, ...], named: str
) -> None:
    with RunningLaunch(tmp_path) as run:
        run.wait_for_step(2)
        run.find(*victim).kill()
        assert run.wait(timeout_seconds=60) == 1
        assert run.processes() == []
        errors = [line for line in run.text().splitlines() if line.startswith("error:")]
        assert len(errors) == 1
        assert named in errors[0]
