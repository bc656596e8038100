"""The lock of a run's directory, which also marks and ends what an own script starts.

The launcher starts all processes of a run as children of one that carries a marker
(`supervisor`). A script that is its own launcher cannot be started anew, so it marks
what it starts from now on.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_dta.config.composed import ConfigError
from areal_dta.processes.reaper import MARKER, start_reaper
from areal_dta.processes.slurm_jobs import JOBS_FILE, cancel_leftovers

_REAPER_SECONDS = 120.0


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a run's directory, so that no two runs write into it.

    Raises:
        ConfigError: another run holds the lock, or the directory is not writable.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "w")
    except OSError as e:
        raise ConfigError(f"cannot write to {directory}: {e.strerror}") from e
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ConfigError(
                f"another run is using {directory}; wait for it, "
                "or set another trial_name"
            ) from e
        yield


@contextmanager
def children_end_with_run(directory: Path) -> Iterator[str]:
    """Kill what this process starts meanwhile, when the context or the process ends.

    Slurm jobs that are recorded in the run's directory are cancelled as well, those of
    an earlier run that was killed at once.

    Yields:
        The marker that the processes carry.
    """
    cancel_leftovers(directory / JOBS_FILE)
    before = os.environ.get(MARKER)
    marker = uuid.uuid4().hex
    reaper = start_reaper(marker, directory)
    os.environ[MARKER] = marker  # not seen in this process's own /proc entry
    try:
        yield marker
    finally:
        os.environ.pop(MARKER)
        if before is not None:
            os.environ[MARKER] = before
        assert reaper.stdin is not None
        reaper.stdin.close()
        reaper.wait(timeout=_REAPER_SECONDS)
