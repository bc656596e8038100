"""A Ray for one run: the cluster that RAY_ADDRESS names, or one on this machine.

Ray places a worker when it has as many CPUs left as the worker asks for, and until
then waits without a word. On one machine these are a bookkeeper's CPUs, which several
processes may share, so Ray is started with as many as the run needs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import ray
from ray._private import ray_constants

ADDRESS_VARIABLE = "RAY_ADDRESS"
_SINGLE_NODE_VARIABLE = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR


def start_ray(num_cpus: int, loopback: bool) -> Callable[[], None]:
    """Connect to Ray, or start one that ends with this process.

    Args:
        num_cpus: of all workers of the run.
        loopback: let a Ray that is started listen on 127.0.0.1 alone.

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
    undo = _listen_on_loopback() if loopback else lambda: None
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
    """Ray itself waits for minutes for an address where nobody is."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _listen_on_loopback() -> Callable[[], None]:
    """Have a Ray that is started next, and its workers, take 127.0.0.1 for the node's
    address, and listen there alone. Returns what undoes it.

    Ray has a switch for this, meant for systems on which it cannot form clusters; it
    works on any (2.60), but is read once, at import.
    """
    before = os.environ.get(_SINGLE_NODE_VARIABLE)
    was_cluster = ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_SINGLE_NODE_VARIABLE] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False

    def undo() -> None:
        ray_constants.ENABLE_RAY_CLUSTER = was_cluster
        if before is None:
            os.environ.pop(_SINGLE_NODE_VARIABLE, None)
        else:
            os.environ[_SINGLE_NODE_VARIABLE] = before

    return undo


def _check_cpus(num_cpus: int, where: str) -> None:
    found = int(ray.cluster_resources().get("CPU", 0))
    if found < num_cpus:
        raise RuntimeError(
            f"the run needs {num_cpus} CPUs, {where} has {found} and would wait for "
            f"ever; start it with `ray start --head --num-cpus={num_cpus}`, ask for "
            "fewer (*.scheduling_spec.0.cpu), or use scheduler=local"
        )
