"""AReaL training engines on the tree executor, their dense twins, and which to use.

Importing this package is light: an engine's class loads AReaL when it is first used, so
that ``areal_dta.engine.setting_checks`` can run at start-up, before anything heavy.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

KINDS: Final = {
    "actor": ("DTAPPOActor", "DensePPOActor"),
    "critic": ("DTAPPOCritic", "DensePPOCritic"),
    "lm": ("DTALMEngine", "DenseLMEngine"),
    "dpo": ("DTADPOEngine", "DenseDPOEngine"),
    "rw": ("DTARWEngine", "DenseRWEngine"),
}
"""What is trained -> the tree engine, its dense twin."""
VALUE_KINDS: Final = ("critic", "rw")
"""Kinds that train values, one number per token, instead of a language model."""
PAIR_KINDS: Final = ("dpo", "rw")
"""Kinds whose rows come in pairs, the chosen one first."""

_MODULE_OF: Final = {
    "DTAEngine": "dta_engine",
    **{tree: "tree_engines" for tree, _ in KINDS.values()},
    **{dense: "dense_engines" for _, dense in KINDS.values()},
}


def engine_class(kind: str, engine: str, attn_impl: str) -> Any:
    """Return the class that a backend means, or None for AReaL's own.

    Args:
        kind: a key of `KINDS`.
        engine: ``dta``, ``fsdp``, ...
        attn_impl: of the configuration. Only flash attention respects the boundaries
            of AReaL's packed sequences; under sdpa and eager they silently attend to
            one another in AReaL's dense engines, but not in the dense twins.
    """
    tree, dense = KINDS[kind]
    if engine == "dta":
        return __getattr__(tree)
    # AReaL 1.0.4 cannot run its own reward models (areal_fixes.training_engines), and
    # hands actors and critics only multiples of the number of ranks
    # (collector.controllers).
    ours = kind in ("rw", "actor", "critic") or attn_impl in ("sdpa", "eager")
    return __getattr__(dense) if engine == "fsdp" and ours else None


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    return getattr(module, name)
