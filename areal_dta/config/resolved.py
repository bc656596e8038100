"""A configuration resolved once: every model and server of a run with its backend.

`resolve` parses the backends. The checks, the dry run, the process that trains and its
trainer receive the `ResolvedRun`, so that nothing is parsed, or decided, again.

A user names a backend as ``engine:parallelism``. ``dta:dN`` (the tree engine) and
``local:dN`` (the embedded server) are ours; AReaL gets the same parallelism under the
name of the engine that they extend.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final

from areal.api.alloc_mode import (
    AllocationValidationError,
    InvalidAllocationModeError,
    ModelAllocation,
)

from areal_dta.config.composed import ConfigError, did_you_mean
from areal_dta.config.schema import DTAConfig, DTADPOConfig, DTAGRPOConfig

KIND_OF: Final = {"ppo": "actor", "sft": "lm", "dpo": "dpo", "rw": "rw"}
"""Algorithm -> kind of its trained model, a key of `areal_dta.engine.KINDS`."""


TRAIN_BACKENDS: Final = {
    "dta": "fsdp",
    "fsdp": "fsdp",
    "megatron": "megatron",
    "archon": "archon",
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


@dataclass(frozen=True, slots=True)
class Section:
    """One model on a training engine, or one rollout server."""

    name: str
    """Its key in the configuration, e.g. ``actor`` or ``teacher.train``."""
    kind: str
    """A key of `areal_dta.engine.KINDS`, or ``server``."""
    config: Any
    backend: Backend


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A configuration that fits the schema, with its parsed backends."""

    config: DTAConfig
    models: tuple[Section, ...]
    """Models on training engines; the actor, which is trained, comes first."""
    rollout: Section | None = None
    """The rollout server; None for algorithms without rollouts."""
    teacher: Section | None = None
    """The rollout server that scores sequences as the teacher, if there is one."""

    @property
    def actor(self) -> Section:
        return self.models[0]

    @property
    def worker_pools(self) -> tuple[Section, ...]:
        """All sections for which AReaL's scheduler starts workers."""
        servers = (self.rollout, self.teacher)
        return (*self.models, *(server for server in servers if server is not None))

    def for_areal(self) -> ResolvedRun:
        """Return a deep copy whose ``backend`` strings AReaL can parse.

        ``engine`` of each section keeps the engine that the user named.
        """
        run = copy.deepcopy(self)  # one memo: run.models[0].config is run.config.actor
        # A teacher's server is AReaL's own in every case.
        for section in (*run.models, run.rollout):
            if section is not None:
                section.config.engine = section.backend.engine
                section.config.backend = section.backend.areal
        return run


def resolve(config: DTAConfig) -> ResolvedRun:
    """Parse the backends of all models and servers.

    Raises:
        ConfigError: unknown engine, or parallelism that it does not support.
    """
    kind = KIND_OF[config.algorithm]
    models = [_section("actor", kind, config.actor)]
    if isinstance(config, DTADPOConfig):
        models.append(_section("ref", kind, config.ref))
    if not isinstance(config, DTAGRPOConfig):
        return ResolvedRun(config, tuple(models))
    if config.critic is not None:
        models.append(_section("critic", "critic", config.critic))
    if config.ref is not None and config.actor.kl_ctl > 0:  # AReaL's own condition
        models.append(_section("ref", kind, config.ref))
    rollout = _section("rollout", "server", config.rollout, ROLLOUT_BACKENDS)
    teacher = None
    if config.teacher is not None and config.teacher.engine_type == "train":
        models.append(_section("teacher.train", kind, config.teacher.train))
    elif config.teacher is not None:
        spec = config.teacher.rollout.backend
        if spec.partition(":")[0] == "local":
            raise ConfigError(
                f"teacher.rollout.backend={spec}: the embedded server does not score "
                "given tokens; use sglang:dN, or teacher.engine_type=train with "
                "teacher.train.backend=dta:d1"
            )
        teacher = _section(
            "teacher.rollout", "server", config.teacher.rollout, TEACHER_BACKENDS
        )
    return ResolvedRun(config, tuple(models), rollout, teacher)


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


def _section(
    name: str, kind: str, config: Any, known: dict[str, str] = TRAIN_BACKENDS
) -> Section:
    backend = parse_backend(config.backend, f"{name}.backend", known)
    return Section(name, kind, config, backend)
