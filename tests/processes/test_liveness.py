"""Dead workers are noticed, busy ones are not taken for dead."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from functools import partial

import psutil

from areal_dta.processes.liveness import LivenessMonitor, port_is_dead, process_is_dead

FAST = 0.02


def test_a_closed_port_is_a_death() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe = partial(port_is_dead, *server.getsockname())
        assert not probe()
        assert not probe()  # nobody accepts: busy, not dead
    assert probe()


def test_an_ended_process_is_a_death() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    probe = partial(process_is_dead, psutil.Process(child.pid))
    assert not probe()
    child.kill()
    psutil.wait_procs([psutil.Process(child.pid)], timeout=10)
    assert probe()  # a zombie, or gone already
    child.wait()
    assert probe()


def test_one_death_is_told_once() -> None:
    messages: list[str] = []
    told = threading.Event()

    def on_death(message: str) -> None:
        messages.append(message)
        told.set()

    probes = {"worker a": lambda: False, "worker b": lambda: True}
    with LivenessMonitor(probes, on_death, FAST):
        assert told.wait(10)
    assert len(messages) == 1
    assert messages[0].startswith("worker b has died")


def test_a_single_lost_probe_is_no_death() -> None:
    messages: list[str] = []
    calls = iter([True, False, True, False, False])
    done = threading.Event()

    def flaky() -> bool:
        answer = next(calls, None)
        if answer is None:
            done.set()
        return bool(answer)

    with LivenessMonitor({"worker": flaky}, messages.append, FAST):
        assert done.wait(10)
    assert messages == []
