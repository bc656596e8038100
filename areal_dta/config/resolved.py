"""A configuration resolved once: every model and server of a run with its backend.

`resolve` parses the backends. The checks, the dry run, the process that trains and its
trainer receive the `ResolvedRun`, so that nothing is parsed, or decided, again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_dta.config.backends import (
    ROLLOUT_BACKENDS,
    TEACHER_BACKENDS,
    TRAIN_BACKENDS,
    Backend,
    parse_backend,
)
from areal_dta.config.composed import ConfigError
from areal_dta.config.schema import DTAConfig, DTADPOConfig, DTAGRPOConfig

KIND_OF: Final = {"ppo": "actor", "sft": "lm", "dpo": "dpo", "rw": "rw"}
"""Algorithm -> kind of its trained model, a key of `areal_dta.engine.KINDS`."""


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
        config = run.config
        run_dir = Path(config.cluster.fileroot, config.experiment_name)
        for model in run.models:
            dta = model.config.dta
            skipped = run_dir / config.trial_name / "skipped_steps"
            dta.skipped_dir = dta.skipped_dir or str(skipped)
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


def _section(
    name: str, kind: str, config: Any, known: dict[str, str] = TRAIN_BACKENDS
) -> Section:
    backend = parse_backend(config.backend, f"{name}.backend", known)
    return Section(name, kind, config, backend)
