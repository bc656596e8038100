"""Configuration: the schema, options of engines and server, and a run's resolved value.

Importing the package is light. Its configuration classes, which need AReaL, are loaded
when they are asked for: ``from areal_dta.config import DTAGRPOConfig``.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name[0].isupper():  # not a module of ours, which may be light
        schema = import_module(f"{__name__}.schema")
        if hasattr(schema, name):
            return getattr(schema, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
