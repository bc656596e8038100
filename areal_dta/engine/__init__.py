"""AReaL training engines on the tree executor.

Importing this package is light: the engine classes load AReaL when first used, so
that ``areal_dta.engine.checks`` can run at start-up, before anything heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from areal_dta.engine.checks import check_actor_config, check_model_config

if TYPE_CHECKING:
    from areal_dta.engine.actor import DTAPPOActor
    from areal_dta.engine.dense import DensePPOActor
    from areal_dta.engine.dta_engine import DTAEngine

_MODULE_OF = {
    "DTAEngine": "areal_dta.engine.dta_engine",
    "DTAPPOActor": "areal_dta.engine.actor",
    "DensePPOActor": "areal_dta.engine.dense",
}

__all__ = [
    "DTAEngine",
    "DTAPPOActor",
    "DensePPOActor",
    "check_actor_config",
    "check_model_config",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
