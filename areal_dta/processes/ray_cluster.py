"""A Ray for one run: the cluster that RAY_ADDRESS names, or one on this machine.

Ray places a worker when as many CPUs are left as the worker asks for, and until then
waits silently. It only counts CPUs, and does not bind processes to them, so on one
machine Ray is started with as many as the run needs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import ray

from areal_dta.areal_fixes.loopback import ray_on_loopback

ADDRESS_VARIABLE = "RAY_ADDRESS"


def start_ray(num_cpus: int, loopback: bool) -> Callable[[], None]:
    """Connect to Ray, or start one that ends with this process.

    Args:
        num_cpus: CPUs that all workers of the run ask for together.
        loopback: let a Ray that is started here listen on 127.0.0.1 alone.

    Returns:
        A function that disconnects, and ends a Ray that was started here.

    Raises:
        RuntimeError: the cluster has fewer CPUs than the run needs, or is not there.
    """
    if ray.is_initialized():
        _check_cpus(num_cpus, "the Ray that this process is connected to")
        return lambda: None
    if address := os.environ.get(ADDRESS_VARIABLE):
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=True)
        except (ConnectionError, TimeoutError) as error:
            raise RuntimeError(
                f"{ADDRESS_VARIABLE}={address}: no Ray there ({error}); start it, or "
                f"unset {ADDRESS_VARIABLE} to have one started on this machine"
            ) from error
        try:
            _check_cpus(num_cpus, f"the cluster of {ADDRESS_VARIABLE}={address}")
        except RuntimeError:
            ray.shutdown()
            raise
        return ray.shutdown
    undo = ray_on_loopback() if loopback else lambda: None
    try:
        present = os.cpu_count() or 1
        ray.init(num_cpus=max(num_cpus, present), include_dashboard=False)
    except BaseException:
        undo()
        raise

    def stop() -> None:
        ray.shutdown()
        undo()

    return stop


def _knock(address: str) -> None:
    """Fail at once where nobody listens: Ray itself waits for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _check_cpus(num_cpus: int, where: str) -> None:
    found = int(ray.cluster_resources().get("CPU", 0))
    if found < num_cpus:
        raise RuntimeError(
            f"the run needs {num_cpus} CPUs, {where} has {found} and would wait for "
            f"ever; start it with `ray start --head --num-cpus={num_cpus}`, ask for "
            "fewer (*.scheduling_spec.0.cpu), or use scheduler=local"
        )
