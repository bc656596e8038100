"""A Slurm of one node on this machine, from Debian's `slurm-wlm` and `munge`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
KillWait=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=64000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Path]:
    """Run munged, slurmctld and slurmd; yield the file for ``SLURM_CONF``."""
    programs = ("sbatch", "munged", "slurmctld", "slurmd")
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed (slurm-wlm, munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd has to run as root")
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    settings = folder / "slurm.conf"
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        ports = first.getsockname()[1], second.getsockname()[1]
    settings.write_text(
        _SETTINGS.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            controller_port=ports[0],
            node_port=ports[1],
        )
    )
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed")]
    commands = (
        ["munged", "-F", "--force", f"--key-file={key}", *munge]
        + [f"--socket={folder}/munge/socket"],
        ["slurmctld", "-D", "-c", "-f", str(settings)],
        ["slurmd", "-D", "-f", str(settings)],
    )
    daemons = []
    try:
        for command in commands:
            with open(folder / f"{command[0]}.out", "wb") as out:
                daemons.append(subprocess.Popen(command, stdout=out, stderr=out))
            time.sleep(1.0)
        _wait_until_idle(settings)
        yield settings
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=20)


def queued(settings: Path) -> list[str]:
    """Return a line per job that waits or runs."""
    return _ask(settings, "squeue", "--noheader").splitlines()


def _wait_until_idle(settings: Path, timeout_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while "idle" not in (found := _ask(settings, "sinfo", "--noheader")):
        logs = [p.read_text() for p in settings.parent.glob("*.log")]
        assert time.monotonic() < deadline, (found, logs)
        time.sleep(0.5)


def _ask(settings: Path, *command: str) -> str:
    env = os.environ | {"SLURM_CONF": str(settings)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return done.stdout
