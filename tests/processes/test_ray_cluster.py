"""A Ray of the run's own: enough CPUs, loopback only, or a clear error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ray_on_this_machine_has_the_cpus_that_are_asked_for() -> None:
    code = """
import psutil, ray
from areal_dta.processes.ray_cluster import start_ray

stop = start_ray(num_cpus=9, loopback=True)
assert ray.cluster_resources()["CPU"] == 9
print("gcs", ray.get_runtime_context().gcs_address)
try:
    start_ray(num_cpus=10, loopback=True)
except RuntimeError as error:
    print(error)
stop()
assert not ray.is_initialized()
"""
    result = _run(code)
    assert result.returncode == 0, result.stderr
    assert "gcs 127.0.0.1:" in result.stdout
    assert "needs 10 CPUs" in result.stdout and "has 9" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_cluster_that_is_not_there() -> None:
    code = """
from areal_dta.processes.ray_cluster import start_ray

start_ray(num_cpus=1, loopback=True)
"""
    result = _run(code, RAY_ADDRESS="127.0.0.1:1")
    assert result.returncode == 1
    assert "RAY_ADDRESS=127.0.0.1:1: no Ray there" in result.stderr


def _run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | env
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
