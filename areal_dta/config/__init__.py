"""Configuration: the schema, options of engines and server, backends, and errors.

Importing the package is light. Its configuration classes, which need AReaL, are loaded
when they are asked for: ``from areal_dta.config import DTAGRPOConfig``.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if not name.startswith("__"):
        for module in ("schema", "resolved"):
            found = import_module(f"{__name__}.{module}")
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
