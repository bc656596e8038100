"""Keep AReaL's processes off the network when they all run on one machine.

Third-party patch of areal 1.0.x. Its workers, callback server and rollout servers
listen on, and are addressed by, the machine's outward address (`gethostip`), without
authentication; their RPC imports and calls what it is told to. On one machine the
loopback interface does. AReaL has no setting for it, and binds the function's name in
many modules, so the name is replaced in each. Undo: call what `use_loopback` returns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

# The modules that ask for the address when they listen or connect.
_USERS = (
    "areal.infra.controller.rollout_controller",
    "areal.infra.remote_inf_engine",
    "areal.infra.scheduler.local",
)

LOOPBACK = "127.0.0.1"
# What each process of a distributed job on one machine needs; gloo binds as well.
LOOPBACK_ENV = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}


def use_loopback() -> Callable[[], None]:
    """Make AReaL take the loopback address for the machine's, in this process.

    Returns:
        A function that undoes it.

    Raises:
        RuntimeError: an AReaL version for which this was not checked.
    """
    if not (found := version("areal")).startswith("1.0."):
        raise RuntimeError(
            f"launch.loopback=true is checked with areal 1.0.x, found {found}; "
            "set launch.loopback=false"
        )
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
