"""Kill what a run leaves behind when its launcher dies without a chance to clean up.

Every process of a run carries `MARKER` in its environment, inherited from the first.
The launcher runs ``python -m areal_dta.processes.reaper MARKER DIRECTORY`` outside the
run, and holds the write end of its standard input. When the launcher is gone, be it by
``kill -9``, the kernel closes the pipe, what still carries the marker is killed, and
Slurm jobs that are recorded in the run's directory are cancelled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil

from areal_dta.processes.slurm_jobs import JOBS_FILE, cancel_recorded

MARKER: Final = "AREAL_DTA_RUN"


def start_reaper(marker: str, directory: Path) -> subprocess.Popen[bytes]:
    """Start the reaper; closing its ``stdin`` (or dying) makes it act and end."""
    # Without the marker of a run that this launcher itself may be part of: the reaper
    # must outlive that one's purge, to carry out its own.
    env = {k: v for k, v in os.environ.items() if k != MARKER}
    return subprocess.Popen(
        [sys.executable, "-m", "areal_dta.processes.reaper", marker, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=env,
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
    )


def marked_processes(marker: str) -> list[psutil.Process]:
    """Return the living processes of this user that carry the marker."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == marker:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # another user's, a zombie, or gone meanwhile
    return [p for p in found if p.pid != os.getpid()]


def kill_marked(marker: str, timeout_seconds: float = 10.0) -> bool:
    """Kill until none is left. Return False if some survive the time-out."""
    deadline = time.monotonic() + timeout_seconds
    while processes := marked_processes(marker):
        if time.monotonic() > deadline:
            return False
        for process in processes:  # one that forks meanwhile is found next time
            try:
                process.kill()
            except psutil.Error:
                continue
        time.sleep(0.05)
    return True


def main(argv: list[str]) -> int:
    marker, directory = argv
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    is_empty = kill_marked(marker)
    return 0 if cancel_recorded(Path(directory, JOBS_FILE)) is None and is_empty else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
