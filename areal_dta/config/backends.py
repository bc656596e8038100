"""Backends as the user names them, ``engine:parallelism``, and as AReaL parses them.

``dta:dN`` (the tree engine) and ``local:dN`` (the embedded server) are ours; AReaL gets
the same parallelism under the name of the engine that they extend. ``fsdp:dN`` is the
dense twin: AReaL's engine with this package's dispatch, normalization and minibatches.
``areal-fsdp:dN`` is AReaL's engine and controller untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from areal_dta.config.composed import ConfigError, did_you_mean

TRAIN_BACKENDS: Final = {
    "dta": "fsdp",
    "fsdp": "fsdp",
    "megatron": "megatron",
    "archon": "archon",
    "areal-fsdp": "fsdp",
}
"""Training engine -> the name under which AReaL parses its parallelism."""
ROLLOUT_BACKENDS: Final = {"local": "sglang", "sglang": "sglang", "vllm": "vllm"}
TEACHER_BACKENDS: Final = {"sglang": "sglang", "vllm": "vllm"}
"""Servers that can score given tokens, as a teacher has to."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A parsed ``engine:parallelism`` string."""

    engine: str
    """Ours: ``dta``, ``fsdp``, ``local``, ..."""
    areal: str
    """The same parallelism under a name that AReaL parses, e.g. ``fsdp:d2``."""
    num_ranks: int
    dp_size: int


def parse_backend(spec: str, key: str, known: dict[str, str]) -> Backend:
    """Parse e.g. ``dta:d2``.

    Args:
        key: the configuration key, for messages.
        known: `TRAIN_BACKENDS`, `ROLLOUT_BACKENDS` or `TEACHER_BACKENDS`.

    Raises:
        ConfigError: unknown engine, bad parallelism, or one that the engine lacks.
    """
    engine, separator, strategy = spec.partition(":")
    if engine not in known:
        raise ConfigError(
            f"{key}={spec}: unknown backend {engine!r}{did_you_mean(engine, known)}; "
            f"expected one of {', '.join(known)}, as in {key}={next(iter(known))}:d1"
        )
    if not separator or not strategy:
        raise ConfigError(f"{key}={spec}: no parallelism; expected e.g. {engine}:d1")
    from areal.api.alloc_mode import (  # this module is light
        AllocationValidationError,
        InvalidAllocationModeError,
        ModelAllocation,
    )

    areal = f"{known[engine]}:{strategy}"
    try:
        parallel = ModelAllocation.from_str(areal).parallel
    except (ValueError, AllocationValidationError, InvalidAllocationModeError) as e:
        raise ConfigError(
            f"{key}={spec}: cannot read the parallelism {strategy!r} "
            f"({type(e).__name__}); expected e.g. {engine}:d2"
        ) from e
    if engine in ("dta", "local") and parallel.world_size != parallel.dp_size:
        raise ConfigError(
            f"{key}={spec}: {engine} is data parallel only; "
            f"expected {engine}:d{parallel.world_size}"
        )
    return Backend(engine, areal, parallel.world_size, parallel.dp_size)
