"""Rollout backend `local`: an embedded inference server that needs no GPU.

It speaks the part of SGLang's HTTP protocol that AReaL's own client uses and generates
with Transformers. Read `protocol.py` (what is said), `generation.py` (how tokens are
made), `worker.py` (who makes them), `server.py` (the process) and `backend.py` (how
AReaL starts it).

The server process imports this package, so AReaL (seconds to import) is loaded only
when `LocalEngine` is asked for.
"""

from typing import TYPE_CHECKING, Any

from areal_dta.rollout_server.config import LocalServerConfig

if TYPE_CHECKING:
    from areal_dta.rollout_server.areal_backend import LocalBackend, LocalEngine

__all__ = ["LocalBackend", "LocalEngine", "LocalServerConfig"]


def __getattr__(name: str) -> Any:
    if name in ("LocalBackend", "LocalEngine"):
        from areal_dta.rollout_server import areal_backend as backend

        return getattr(backend, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
