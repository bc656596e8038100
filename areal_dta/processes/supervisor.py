"""Run one command with everything that it starts, and leave nothing of it behind.

The supervisor is the ancestor of all processes of a run: it adopts orphans (Linux's
child subreaper), so that a worker whose parent died is still found and killed. A
`reaper` covers the one case left, the death of the supervisor itself.

Invariants (tested in tests/processes/test_supervisor.py): after `Supervisor.stop`, and
after a ``kill -9`` of the supervisor, no process of the run lives.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from areal_dta.processes.reaper import MARKER, kill_marked, start_reaper
from areal_dta.processes.slurm_jobs import JOBS_FILE, cancel_recorded

Event = dict[str, Any]

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def become_subreaper() -> None:
    """Adopt orphaned descendants. Linux only; elsewhere the marker alone finds them."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class Supervisor:
    """One supervised command; its events come as JSON lines over a pipe.

    The command gets ``--event-fd N``, the number of the pipe's write end. Its standard
    output and error go to ``log_path``, those of its children with them.
    """

    def __init__(self, command: Sequence[str], log_path: Path) -> None:
        become_subreaper()
        self.marker = uuid.uuid4().hex
        self._jobs_file = log_path.with_name(JOBS_FILE)
        self._reaper = start_reaper(self.marker, log_path.parent)
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read_fd, selectors.EVENT_READ)
        self._partial = b""
        with open(log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--event-fd", str(write_fd)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {MARKER: self.marker, "PYTHONUNBUFFERED": "1"},
                pass_fds=[write_fd],
                start_new_session=True,  # a Ctrl-C reaches the supervisor alone
            )
        os.close(write_fd)

    def read_events(self, timeout_seconds: float) -> list[Event]:
        """Return events that have arrived, waiting for the first until the time-out."""
        if not self._selector.get_map() or not self._selector.select(timeout_seconds):
            return []
        try:
            data = os.read(self._read_fd, 1 << 20)
        except BlockingIOError:
            return []
        if not data:  # all write ends are closed; the command is about to end
            self._selector.unregister(self._read_fd)
            return []
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def exit_code(self) -> int | None:
        """Return the exit code: -N if signal N ended it, None while it runs."""
        self._reap_adopted()
        return self.process.poll()

    def request_stop(self) -> None:
        """Ask the command to end in good order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self, term_seconds: float = 3.0) -> str | None:
        """End everything that is left: SIGTERM, then SIGKILL. Safe to call twice.

        Returns:
            What to tell the user if Slurm jobs could not be cancelled.
        """
        alive = self._descendants()
        for process in alive:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + term_seconds
        while self._descendants() and time.monotonic() < deadline:
            self.exit_code()
            time.sleep(0.05)
        deadline = time.monotonic() + 10.0
        while (alive := self._descendants()) and time.monotonic() < deadline:
            for process in alive:
                _signal(process, signal.SIGKILL)
            self.exit_code()
            time.sleep(0.05)
        self._wait_for_adopted()
        kill_marked(self.marker)  # where orphans are not adopted (not Linux)
        left = cancel_recorded(self._jobs_file)
        if self._reaper.stdin is not None:
            self._reaper.stdin.close()
        self._reaper.wait(timeout=120.0)
        self._selector.close()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1
        return left

    def _descendants(self) -> list[psutil.Process]:
        """Return all living processes below the supervisor but the reaper."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if (
                    process.pid != self._reaper.pid
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _adopted(self) -> list[psutil.Process]:
        own = (self.process.pid, self._reaper.pid)
        return [c for c in psutil.Process().children() if c.pid not in own]

    def _reap_adopted(self) -> None:
        """Collect adopted children that have ended, so that no zombies pile up."""
        for child in self._adopted():
            try:
                if child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)
            except (psutil.NoSuchProcess, ChildProcessError):
                continue

    def _wait_for_adopted(self, timeout_seconds: float = 2.0) -> None:
        """Collect the last zombies: each is adopted only when its parent is gone."""
        deadline = time.monotonic() + timeout_seconds
        self.process.poll()
        while self._adopted() and time.monotonic() < deadline:
            self._reap_adopted()
            time.sleep(0.02)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass
