"""Which engine class trains what. Light: names, until one is asked for."""

from __future__ import annotations

from typing import Any, Final

# kind -> the tree engine, its dense twin
KINDS: Final = {
    "actor": ("DTAPPOActor", "DensePPOActor"),
    "critic": ("DTAPPOCritic", "DensePPOCritic"),
    "lm": ("DTALMEngine", "DenseLMEngine"),
    "dpo": ("DTADPOEngine", "DenseDPOEngine"),
    "rw": ("DTARWEngine", "DenseRWEngine"),
}
VALUE_KINDS: Final = ("critic", "rw")
"""Those that train values, a number a token, instead of a language model."""
PAIR_KINDS: Final = ("dpo", "rw")
"""Those whose rows come in pairs, the chosen one first."""


def engine_class(kind: str, engine: str, attn_impl: str) -> Any:
    """The class of this package that a backend means, or None for AReaL's own.

    Args:
        kind: a key of `KINDS`.
        engine: ``dta``, ``fsdp``, ...
        attn_impl: of the configuration. Only flash attention takes the boundaries of
            AReaL's packed sequences; under sdpa and eager they attend to one another,
            without a word, in AReaL's dense engines but not in the dense twins.
    """
    import areal_dta.engine as engines

    tree, dense = KINDS[kind]
    if engine == "dta":
        return getattr(engines, tree)
    # AReaL 1.0.4 cannot run its own reward models (see pair_rewards), and deals prompts
    # to actors and critics only in multiples of the ranks (see rollout.dispatch).
    ours = kind in ("rw", "actor", "critic") or attn_impl in ("sdpa", "eager")
    if engine == "fsdp" and ours:
        return getattr(engines, dense)
    return None
