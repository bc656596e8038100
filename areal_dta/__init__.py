"""areal_dta: RL training of language models on prefix trees, on top of AReaL.

Scripts in AReaL's style take trainer and configuration from here: `PPOTrainer` with
`GRPOConfig` (or `PPOConfig`), and `SFT`, `DPO` and `RW` likewise (docs/migrate.md).

Imports stay light on purpose: ``import areal_dta.tree`` needs numpy alone and
``import areal_dta.executor`` needs torch and transformers, never areal. The names above
are loaded when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_dta.startup.own_script import (
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        PPOConfig,
        PPOTrainer,
        RWConfig,
        RWTrainer,
        SFTConfig,
        SFTTrainer,
    )

__version__ = "0.2.0.dev0"

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "PPOConfig",
    "PPOTrainer",
    "RWConfig",
    "RWTrainer",
    "SFTConfig",
    "SFTTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("areal_dta.startup.own_script"), name)
