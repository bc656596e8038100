"""Keep the processes of a run on one machine off the network.

AReaL binds the name `gethostip` in many modules, so it is replaced in each. Processes
learn of it from their environment (`LOOPBACK_ENV`), which a forked one inherits.

``python -m areal_dta.areal_fixes.loopback`` is AReaL's RPC worker on loopback only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Any, Final

# The modules that ask for the address when they listen or connect.
_USERS: Final = (
    "areal.infra.controller.rollout_controller",
    "areal.infra.remote_inf_engine",
    "areal.infra.scheduler.local",
)
_AREAL_WORKER: Final = "python -m areal.infra.rpc.rpc_server"
_WORKER: Final = "python -m areal_dta.areal_fixes.loopback"

LOOPBACK: Final = "127.0.0.1"
LOOPBACK_VARIABLE: Final = "AREAL_DTA_LOOPBACK"
LOOPBACK_ENV: Final = {
    LOOPBACK_VARIABLE: "1",
    # gloo binds as well
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}


# What `requests` and httpx look for, which AReaL and agents use. A proxy cannot reach
# another machine's loopback, and would answer in the place of our own servers.
_NO_PROXY_VARIABLES: Final = ("no_proxy", "NO_PROXY")
_NEVER_PROXIED: Final = ("127.0.0.1", "localhost", "::1")


def bypass_proxies() -> None:
    """Let this process and its children reach loopback without a proxy.

    Environment variables may name a proxy for everything (`http_proxy`, `all_proxy`).
    """
    named = ",".join(os.environ.get(name, "") for name in _NO_PROXY_VARIABLES)
    hosts = [host.strip() for host in named.split(",") if host.strip()]
    value = ",".join(dict.fromkeys([*hosts, *_NEVER_PROXIED]))
    os.environ.update(dict.fromkeys(_NO_PROXY_VARIABLES, value))


def use_loopback() -> Callable[[], None]:
    """Make AReaL take the loopback address for the machine's, in this process.

    Returns:
        A function that undoes it.
    """
    for name in _USERS:
        import_module(name)
    import areal.utils.network as network

    original = network.gethostip

    def gethostip(probe_host: str = "", probe_port: int = 0) -> str:
        return LOOPBACK

    patched: list[ModuleType] = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("areal.") and getattr(module, "gethostip", None) is original
    ]
    for module in patched:
        module.gethostip = gethostip  # type: ignore[attr-defined]
    os.environ.update(LOOPBACK_ENV)

    def undo() -> None:
        for module in patched:
            module.gethostip = original  # type: ignore[attr-defined]
        for key in LOOPBACK_ENV:
            os.environ.pop(key, None)

    return undo


def workers_on_loopback(sections: Iterable[Any]) -> None:
    """Let the workers of these configuration sections be started on loopback."""
    for section in sections:
        for spec in section.scheduling_spec:
            if spec.cmd == _AREAL_WORKER:
                spec.cmd = _WORKER
            spec.env_vars = {**LOOPBACK_ENV, **spec.env_vars}


def ray_on_loopback() -> Callable[[], None]:
    """Let a Ray that is started next take 127.0.0.1 for its node's address.

    It and its workers then listen there alone. Ray has a switch for this, meant for
    systems on which it cannot form clusters; it works on any, but is read once, at
    import.

    Returns:
        A function that undoes it.
    """
    from ray._private import ray_constants

    variable = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before = os.environ.get(variable)
    was_cluster = ray_constants.ENABLE_RAY_CLUSTER
    os.environ[variable] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False

    def undo() -> None:
        ray_constants.ENABLE_RAY_CLUSTER = was_cluster
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before

    return undo


def main() -> None:
    from areal.infra.rpc import rpc_server

    bypass_proxies()
    use_loopback()
    sys.argv[1:1] = ["--host", LOOPBACK]
    rpc_server.main()


if __name__ == "__main__":
    main()
