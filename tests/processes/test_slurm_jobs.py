"""Recorded Slurm jobs are cancelled: stand-ins for squeue and scancel."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from areal_dta.config.composed import ConfigError
from areal_dta.processes.slurm_jobs import (
    JOBS_FILE,
    cancel_leftovers,
    cancel_recorded,
    record_job,
    start_record,
)

SQUEUE = 'cat "$QUEUE"\n'
SCANCEL = """
echo "$@" >> "$QUEUE.cancelled"
for id in "$@"; do sed -i "/^$id /d" "$QUEUE"; done
"""


class Slurm:
    """Programs that keep a queue of ``id comment`` lines in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue = folder / "queue"
        self.queue.write_text("")
        self.program("squeue", SQUEUE)
        self.program("scancel", SCANCEL)

    def program(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def cancelled(self) -> list[str]:
        path = self.queue.with_name("queue.cancelled")
        return sorted(path.read_text().split()) if path.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    slurm = Slurm(folder)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(slurm.queue))
    return slurm


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / JOBS_FILE


def test_only_the_jobs_of_the_run_are_cancelled(slurm: Slurm, record: Path) -> None:
    comment = start_record(record, "run1")
    record_job(record, 11)
    # 12 was submitted just before the run was killed, and never recorded
    slurm.queue.write_text(f"11 {comment}\n12 {comment}\n13 areal_dta:run2\n14 \n")
    assert cancel_recorded(record) is None
    assert slurm.cancelled == ["11", "12"]
    assert slurm.queue.read_text() == "13 areal_dta:run2\n14 \n"
    assert not record.exists()


def test_recorded_job_that_lost_its_comment(slurm: Slurm, record: Path) -> None:
    start_record(record, "run1")
    record_job(record, 11)
    slurm.queue.write_text("11 (null)\n111 (null)\n")
    assert cancel_recorded(record) is None
    assert slurm.cancelled == ["11"]


def test_without_a_record_slurm_is_not_asked(slurm: Slurm, record: Path) -> None:
    slurm.program("squeue", "exit 1\n")
    assert cancel_recorded(record) is None


def test_jobs_that_do_not_end(slurm: Slurm, record: Path) -> None:
    comment = start_record(record, "run1")
    slurm.queue.write_text(f"11 {comment}\n")
    slurm.program("scancel", "true\n")
    message = cancel_recorded(record, timeout_seconds=0.1)
    assert message is not None and "squeue -j 11" in message
    assert record.exists()  # the next start tries again


def test_slurm_does_not_answer(slurm: Slurm, record: Path) -> None:
    start_record(record, "run1")
    record_job(record, 11)
    slurm.program("squeue", "exit 1\n")
    message = cancel_recorded(record)
    assert message is not None and "11" in message and "scancel" in message
    with pytest.raises(ConfigError, match="an earlier run left jobs"):
        cancel_leftovers(record)


def test_leftovers_of_an_earlier_run(slurm: Slurm, record: Path) -> None:
    comment = start_record(record, "run1")
    slurm.queue.write_text(f"11 {comment}\n")
    cancel_leftovers(record)
    assert slurm.cancelled == ["11"]
