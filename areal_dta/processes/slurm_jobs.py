"""The Slurm jobs of a run: recorded while it lives, cancelled when it is over.

Jobs outlive the process that submitted them. Their ids, and the comment that they all
carry, are in a file of the run's directory, which the launcher, its reaper and the next
start of the same run read. The comment also finds a job whose id was not recorded: the
run may have been killed between submission and record.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Final

from areal_dta.config.composed import ConfigError

JOBS_FILE: Final = "slurm_jobs.txt"
_COMMAND_SECONDS: Final = 60.0
_COMMENT: Final = "comment "


def start_record(path: Path, marker: str) -> str:
    """Begin the record of a run's jobs, and return the comment that they are to carry.

    Args:
        path: file for the record.
        marker: unique name of the run.
    """
    comment = f"areal_dta:{marker}"
    path.write_text(f"{_COMMENT}{comment}\n")
    return comment


def record_job(path: Path, job_id: int) -> None:
    """Add a job to the record."""
    with open(path, "a") as file:
        file.write(f"{job_id}\n")


def cancel_recorded(path: Path, timeout_seconds: float = 60.0) -> str | None:
    """Cancel the jobs of a record and remove it once they are gone.

    Args:
        path: file of the record; nothing happens if there is none.
        timeout_seconds: how long jobs may take to end.

    Returns:
        None if no job is left, else what to tell the user.
    """
    if not path.exists():
        return None
    lines = path.read_text().splitlines()
    comments = {line.removeprefix(_COMMENT) for line in lines if _COMMENT in line}
    recorded = {line for line in lines if re.fullmatch(r"\d+", line)}
    deadline = time.monotonic() + timeout_seconds
    try:
        while jobs := _queued(comments, recorded):
            if time.monotonic() > deadline:
                ids = " ".join(sorted(jobs))
                return f"Slurm jobs {ids} do not end; look at them: squeue -j {ids}"
            _run("scancel", *sorted(jobs))
            time.sleep(0.5)
    except (OSError, subprocess.SubprocessError) as error:
        ids = " ".join(sorted(recorded)) or f"with the comment {' '.join(comments)}"
        return f"cannot cancel the Slurm jobs {ids} ({error}); cancel them by scancel"
    path.unlink()
    return None


def cancel_leftovers(path: Path) -> None:
    """Cancel the jobs of an earlier run that could not do so itself.

    Raises:
        ConfigError: some may still run, and would disturb the new run.
    """
    if (message := cancel_recorded(path)) is not None:
        raise ConfigError(f"an earlier run left jobs: {message}; then delete {path}")


def _queued(comments: set[str], recorded: set[str]) -> set[str]:
    """Return which jobs of a run Slurm still knows as waiting or running."""
    found = set()
    for line in _run("squeue", "--noheader", "--me", "--format=%i %k").splitlines():
        job_id, _, comment = line.strip().partition(" ")
        if job_id in recorded or comment in comments:
            found.add(job_id)
    return found


def _run(*command: str) -> str:
    return subprocess.run(
        command,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=_COMMAND_SECONDS,
    ).stdout
