"""Every process of a run on one machine listens on loopback alone."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.running import RunningLaunch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


def listeners(run: RunningLaunch) -> list[tuple[str, str, int]]:
    """Return command, address and port of every listening socket."""
    found = []
    for process in run.processes():
        try:
            command = " ".join(process.cmdline())
            sockets = process.net_connections(kind="inet")
        except psutil.Error:
            continue
        for socket in sockets:
            if socket.status == psutil.CONN_LISTEN:
                found.append((command, socket.laddr.ip, socket.laddr.port))
    return found


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("gsm8k_grpo.yaml", ["actor.backend=dta:d2"]),
        ("gsm8k_calculator.yaml", []),
    ],
)
def test_only_the_tcp_store_is_on_the_network(
    tmp_path: Path, config: str, overrides: list[str]
) -> None:
    small = ["gconfig.max_new_tokens=16", "gconfig.n_samples=4"]
    with RunningLaunch(tmp_path, *overrides, *small, config=config) as run:
        run.wait_for_step(1)
        found = listeners(run)
        outside = [
            (command, ip, port)
            for command, ip, port in found
            if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback
        ]
    assert len(found) >= 4, found  # workers, callback, server
    # PyTorch's TCPStore cannot be told: that of rank 0 of each training role.
    assert len(outside) <= 1, outside
    for command, _, _ in outside:
        assert "--role actor" in command, outside
