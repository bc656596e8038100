"""Processes that die or fall silent: the run ends in time, says why, and continues.

`docs/recovery.md` has the table of faults and what becomes of a run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.running import RunningLaunch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4
RESUMABLE = ("recover.mode=on", "recover.freq_steps=1", f"total_train_steps={STEPS}")
STEP_SECONDS = 30  # time limit of a step in the runs with a silent process

TRAINER = ("--role", "actor")
ROLLOUT_WORKER = ("--role", "rollout")
SERVER = ("areal_dta.rollout_server.server",)
JOB = ("areal_dta.startup.train_process",)


def errors(run: RunningLaunch) -> list[str]:
    return [line for line in run.text().splitlines() if line.startswith("error:")]


def check_continuation(cwd: Path, *overrides: str) -> None:
    """The same command again trains each of the remaining steps once."""
    with RunningLaunch(cwd, *overrides) as run:
        assert run.wait(timeout_seconds=400) == 0, run.text()
        assert [record["step"] for record in run.metrics()] == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_death_of_one_trainer_of_two(tmp_path: Path, rank: str) -> None:
    overrides = (*RESUMABLE, "actor.backend=dta:d2")
    with RunningLaunch(tmp_path, *overrides) as run:
        run.wait_for_step(1)
        run.find(*TRAINER, "--worker-index", rank).kill()
        # not the time-out of the process group, which is minutes
        assert run.wait(timeout_seconds=60) == 1, run.text()
        run.wait_until_empty()
        assert len(errors(run)) == 1 and "actor/" in errors(run)[0]
        assert "recover.mode=on" in run.text()  # how to go on
    check_continuation(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("silent", "backend"),
    [(SERVER, "dta:d1"), (ROLLOUT_WORKER, "dta:d1"), (TRAINER, "dta:d2")],
    ids=["server", "rollout worker", "one trainer of two"],
)
def test_a_process_that_stops_answering(
    tmp_path: Path, silent: tuple[str, ...], backend: str
) -> None:
    """SIGSTOP: its ports still accept, so only the step's time limit can tell."""
    overrides = (*RESUMABLE, f"actor.backend={backend}")
    limit = f"launch.step_timeout_seconds={STEP_SECONDS}"
    with RunningLaunch(tmp_path, *overrides, limit) as run:
        run.wait_for_step(1)
        process = run.find(*silent)
        process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        assert run.wait(timeout_seconds=STEP_SECONDS + 90) == 1, run.text()
        assert time.monotonic() - start < STEP_SECONDS + 60
        run.wait_until_empty()
        assert len(errors(run)) == 1 and "no progress" in errors(run)[0]
    check_continuation(tmp_path, *overrides)


@pytest.mark.parametrize("killed", [SERVER, ROLLOUT_WORKER, JOB, None])
def test_a_killed_process_loses_nothing(
    tmp_path: Path, killed: tuple[str, ...] | None
) -> None:
    with RunningLaunch(tmp_path, *RESUMABLE) as run:
        run.wait_for_step(2)
        if killed is None:
            run.process.kill()
        else:
            run.find(*killed).kill()
        run.wait(timeout_seconds=60)
        run.wait_until_empty()
    check_continuation(tmp_path, *RESUMABLE)


def test_a_rejected_result_is_replaced_in_the_same_step(tmp_path: Path) -> None:
    """Without staleness to spare the run stood still at the first rejection."""
    overrides = (
        "workflow=scripts.bench.soak_workflow.SoakWorkflow",
        "train_dataset.dataset_kwargs={num_problems: 20000}",  # the 27th is damaged
        "rollout.max_head_offpolicyness=0",
        "gconfig.max_new_tokens=64",
        "total_train_steps=8",
    )
    with RunningLaunch(tmp_path, *overrides) as run:
        assert run.wait(timeout_seconds=400) == 0, run.text()
        records = run.metrics()
    assert len(records) == 8
    counts = [record["collector"]["collector/rejected/version"] for record in records]
    assert sum(counts) > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of few megabytes."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_full_disk_at_checkpoint_time(tmp_path: Path, small_disk: Path) -> None:
    overrides = (*RESUMABLE, f"cluster.fileroot={small_disk}")
    filler = small_disk / "filler"
    run_dir = small_disk / "gsm8k-grpo" / "trial0"
    with RunningLaunch(tmp_path, *overrides) as run:
        run.wait_for_step(1)
        try:
            with open(filler, "wb", buffering=0) as file:
                while True:  # until nothing fits any more
                    file.write(b"\0" * 4096)
        except OSError:
            pass
        code = run.wait(timeout_seconds=400)
        run.wait_until_empty()
        assert code == 1
        assert "No space left on device" in run.text() or "disk" in run.text()
    filler.unlink()
    with RunningLaunch(tmp_path, *overrides) as run:
        assert run.wait(timeout_seconds=400) == 0, run.text()
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == STEPS
