"""AReaL training engines on the tree executor.

Importing this package is light: the engine classes load AReaL when first used, so
that ``areal_dta.engine.model_checks`` can run at start-up, before anything heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from areal_dta.engine.model_checks import check_actor_config, check_model_config

if TYPE_CHECKING:
    from areal_dta.engine.actor import DTAPPOActor
    from areal_dta.engine.critic import DTAPPOCritic
    from areal_dta.engine.dense_engines import (
        DenseDPOEngine,
        DenseLMEngine,
        DensePPOActor,
        DensePPOCritic,
        DenseRWEngine,
    )
    from areal_dta.engine.dta_engine import DTAEngine
    from areal_dta.engine.lm import DTALMEngine
    from areal_dta.engine.preference import DTADPOEngine, DTARWEngine

_MODULE_OF = {
    "DTAEngine": "areal_dta.engine.dta_engine",
    "DTAPPOActor": "areal_dta.engine.actor",
    "DTAPPOCritic": "areal_dta.engine.critic",
    "DTALMEngine": "areal_dta.engine.lm",
    "DTADPOEngine": "areal_dta.engine.preference",
    "DTARWEngine": "areal_dta.engine.preference",
    "DensePPOActor": "areal_dta.engine.dense_engines",
    "DensePPOCritic": "areal_dta.engine.dense_engines",
    "DenseLMEngine": "areal_dta.engine.dense_engines",
    "DenseDPOEngine": "areal_dta.engine.dense_engines",
    "DenseRWEngine": "areal_dta.engine.dense_engines",
}

__all__ = [
    "DTADPOEngine",
    "DTAEngine",
    "DTALMEngine",
    "DTAPPOActor",
    "DTAPPOCritic",
    "DTARWEngine",
    "DenseDPOEngine",
    "DenseLMEngine",
    "DensePPOActor",
    "DensePPOCritic",
    "DenseRWEngine",
    "check_actor_config",
    "check_model_config",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
