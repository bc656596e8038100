"""Notice that a worker or server process has died while the trainer waits for it.

AReaL's trainer may wait for hours for an answer that will not come. Two probes: has the
process ended (workers on this machine), and does its port refuse connections (any
scheduler). A dead process refuses at once, while one that is merely busy still accepts:
the kernel does. But a child that it forked may hold its port open, hence the first.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import psutil

from areal_dta.areal_fixes.local_scheduler import BoundedLocalScheduler

Probe = Callable[[], bool]
"""Function that returns True if what it looks at is dead. May take seconds."""

DEAD_IN_A_ROW = 2  # so that one lost probe does not end a run

# Attributes of AReaL's trainers that hold controllers, and through them processes.
_CONTROLLERS = ("actor", "critic", "ref", "teacher", "rollout", "eval_rollout")


def port_is_dead(host: str, port: int) -> bool:
    """Return whether nobody listens on a port any more."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # busy, or a passing fault; the step time-out covers it
    return False


def process_is_dead(process: psutil.Process) -> bool:
    """Return whether a process of this machine has ended."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def died(name: str) -> str:
    """Return what to tell the user."""
    return f"{name} has died; out of memory is a usual cause"


def worker_probes(trainer: Any) -> dict[str, Probe]:
    """Return a probe per process of an AReaL trainer that may die, by its name."""
    probes: dict[str, Probe] = {}
    for name in _CONTROLLERS:
        controller = getattr(trainer, name, None)
        workers = [*getattr(controller, "workers", [])]
        workers += getattr(controller, "proxy_workers", [])
        for worker in workers:
            port = int(worker.worker_ports[0])
            probes[f"worker {worker.id}"] = partial(port_is_dead, worker.ip, port)
    for role in ("rollout", "teacher"):
        servers = getattr(getattr(trainer, role, None), "server_infos", [])
        for rank, server in enumerate(servers):
            name = f"{role} server {rank}"
            probes[name] = partial(port_is_dead, server.host, int(server.port))
    if isinstance(trainer.scheduler, BoundedLocalScheduler):
        for name, process in trainer.scheduler.worker_processes().items():
            probes[f"worker {name}"] = partial(process_is_dead, process)
    # Not every scheduler's workers listen on the port that they are given.
    return {name: probe for name, probe in probes.items() if not probe()}


class LivenessMonitor:
    """Context manager that runs probes in a thread until one finds a death."""

    def __init__(
        self,
        probes: Mapping[str, Probe],
        on_death: Callable[[str], None],
        interval_seconds: float = 2.0,
    ) -> None:
        """
        Args:
            probes: by the name of what each looks at, for messages.
            on_death: called once, in the monitor's thread, with a message.
        """
        self._probes = dict(probes)
        self._on_death = on_death
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="liveness", daemon=True
        )

    def __enter__(self) -> LivenessMonitor:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)

    def _watch(self) -> None:
        dead = dict.fromkeys(self._probes, 0)
        while not self._stop.wait(self._interval_seconds):
            for name, probe in self._probes.items():
                dead[name] = dead[name] + 1 if probe() else 0
                if dead[name] >= DEAD_IN_A_ROW and not self._stop.is_set():
                    self._on_death(died(name))
                    return
