"""No process of a run outlives it: fake runs, real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from areal_dta.processes.reaper import kill_marked, marked_processes
from tests.end_to_end.running import launch_env

pytestmark = pytest.mark.timeout(120)

# A run: a parent, a child, a child in a session of its own, and an orphan that ignores
# SIGTERM; each sleeps for ever.
TREE = """
import json, os, subprocess, sys, time
fd = int(sys.argv[sys.argv.index("--event-fd") + 1])
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
subprocess.run(["bash", "-c", f"{sys.executable} -c '{stubborn}' & disown"])
print("to the log", flush=True)
time.sleep(0.5)
os.write(fd, (json.dumps({"kind": "ready"}) + chr(10)).encode())
END
"""

# The supervisor of such a run; tells the marker, then obeys one line of its input.
SUPERVISE = """
import sys
from pathlib import Path
from areal_dta.processes.supervisor import Supervisor
supervisor = Supervisor([sys.executable, sys.argv[1]], Path(sys.argv[2]))
print(supervisor.marker, flush=True)
events = []
while not events:
    events = supervisor.read_events(timeout_seconds=1.0)
assert events == [{"kind": "ready"}], events
print("ready", flush=True)
if sys.stdin.readline().strip() == "stop":
    supervisor.stop(term_seconds=0.5)
    supervisor.stop()  # harmless
    print("stopped", supervisor.exit_code(), flush=True)
else:
    while supervisor.exit_code() is None:
        supervisor.read_events(timeout_seconds=0.1)
    print("exit", supervisor.exit_code(), flush=True)
    supervisor.stop(term_seconds=0.5)
"""


class Supervised:
    def __init__(self, folder: Path, ending: str = "time.sleep(600)") -> None:
        self.log = folder / "log"
        script = folder / "tree.py"
        script.write_text(TREE.replace("END", ending))
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, str(script), str(self.log)],
            env=launch_env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.marker = self.line()
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)
        kill_marked(self.marker)


def test_stop_ends_children_sessions_and_orphans(tmp_path: Path) -> None:
    with Supervised(tmp_path) as run:
        assert len(marked_processes(run.marker)) >= 4
        run.tell("stop")
        assert run.line() == f"stopped {-signal.SIGTERM}"
        assert marked_processes(run.marker) == []
        assert run.process.wait(timeout=30) == 0
        assert run.log.read_text() == "to the log\n"


def test_nothing_at_all_is_left_not_even_the_reaper(tmp_path: Path) -> None:
    with Supervised(tmp_path) as run:
        descendants = psutil.Process(run.process.pid).children(recursive=True)
        assert any("areal_dta.processes.reaper" in p.cmdline() for p in descendants)
        run.tell("stop")
        run.process.wait(timeout=30)
        assert [p for p in descendants if p.is_running()] == []


def test_kill_minus_nine_of_the_supervisor(tmp_path: Path) -> None:
    with Supervised(tmp_path) as run:
        descendants = psutil.Process(run.process.pid).children(recursive=True)
        os.kill(run.process.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(descendants, timeout=15)
        assert [p.cmdline() for p in alive if p.is_running()] == []
        assert marked_processes(run.marker) == []


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), 9)", -9),
    ],
)
def test_exit_code_of_the_command(tmp_path: Path, ending: str, code: int) -> None:
    with Supervised(tmp_path, ending) as run:
        run.tell("follow")
        assert run.line() == f"exit {code}"
        assert run.process.wait(timeout=30) == 0
        assert marked_processes(run.marker) == []  # its orphans as well


def test_other_processes_are_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with Supervised(tmp_path) as run:
            run.tell("stop")
            run.process.wait(timeout=30)
        time.sleep(0.2)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
