"""Structured configuration: AReaL's GRPO configuration with our additions.

Additions: ``actor.dta`` (the tree engine's options), ``local`` (the embedded rollout
server's), ``launch`` (time-outs), the workflow, reward and data set as import strings;
and the backends ``dta:dN`` and ``local:dN``, which AReaL does not know:
`translate_backends` replaces them before AReaL parses them.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

from areal.api.alloc_mode import ModelAllocation
from areal.api.cli_args import (
    GRPOConfig,
    InferenceEngineConfig,
    PPOActorConfig,
    to_structured_cfg,
)
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from areal_dta.compose import Composed, ConfigError, did_you_mean, one_line
from areal_dta.engine.options import DTAOptions
from areal_dta.engine.prox_logp import fuses_prox_logp
from areal_dta.rollout.local import LocalServerConfig

TRAIN_BACKENDS: Final = {
    "dta": "fsdp",
    "fsdp": "fsdp",
    "megatron": "megatron",
    "archon": "archon",
}
"""Training engine -> the name under which AReaL parses its parallelism."""
ROLLOUT_BACKENDS: Final = {"local": "sglang", "sglang": "sglang", "vllm": "vllm"}


@dataclass
class DTAPPOActorConfig(PPOActorConfig):
    """AReaL's actor configuration with the tree engine's options."""

    dta: DTAOptions = field(default_factory=DTAOptions)
    engine: str = field(
        default="",
        metadata={"help": "Set by the trainer: the engine that `backend` selected."},
    )

    def should_compute_prox_logp(self) -> bool:
        """Whether the trainer runs a forward pass for the proximal logprobs."""
        if self.engine == "dta" and fuses_prox_logp(self):
            return False
        return bool(super().should_compute_prox_logp())


@dataclass
class RolloutConfig(InferenceEngineConfig):
    """AReaL's rollout configuration; `backend` may also be ``local:dN``."""

    engine: str = field(
        default="",
        metadata={"help": "Set by the trainer: the server that `backend` selected."},
    )


@dataclass
class LaunchOptions:
    """How the launcher starts and watches the processes. Seconds throughout."""

    loopback: bool = field(
        default=True,
        metadata={"help": "Workers listen on 127.0.0.1 only (one machine)."},
    )
    worker_timeout_seconds: float = field(
        default=300.0, metadata={"help": "For one worker process to come up."}
    )
    startup_timeout_seconds: float = field(
        default=900.0, metadata={"help": "From the start until the first rollout."}
    )
    step_timeout_seconds: float = field(
        default=1800.0, metadata={"help": "For one training step."}
    )
    grace_seconds: float = field(
        default=15.0,
        metadata={"help": "For an orderly end before processes are killed."},
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if f.name.endswith("_seconds") and getattr(self, f.name) <= 0:
                raise ValueError(
                    f"launch.{f.name}={getattr(self, f.name)}; expected a positive "
                    "number of seconds"
                )


@dataclass
class DTAGRPOConfig(GRPOConfig):
    """A GRPO job. Everything of AReaL's configuration is available too."""

    actor: DTAPPOActorConfig = field(default_factory=DTAPPOActorConfig)
    ref: DTAPPOActorConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    local: LocalServerConfig = field(default_factory=LocalServerConfig)
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    workflow: str = field(
        default="areal.workflow.rlvr.RLVRWorkflow",
        metadata={"help": "Import string of the rollout workflow."},
    )
    reward_fn: str = field(
        default="areal_dta.tasks.math_reward.math_reward_fn",
        metadata={"help": "Import string of the reward function."},
    )
    dataset_fn: str = field(
        default="areal_dta.tasks.gsm8k.load_dataset",
        metadata={"help": "Import string of the function that loads the data set."},
    )
    enable_thinking: bool = field(
        default=False, metadata={"help": "Passed to the model's chat template."}
    )
    note: str = field(
        default="",
        metadata={"help": "Printed under the reward curve: what its rise means."},
    )


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
        known: `TRAIN_BACKENDS` or `ROLLOUT_BACKENDS`.

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
    except Exception as e:  # the parser raises lark's, ValueError and its own
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


def actor_backend(config: DTAGRPOConfig) -> Backend:
    return parse_backend(config.actor.backend, "actor.backend", TRAIN_BACKENDS)


def rollout_backend(config: DTAGRPOConfig) -> Backend:
    return parse_backend(config.rollout.backend, "rollout.backend", ROLLOUT_BACKENDS)


def translate_backends(config: DTAGRPOConfig) -> DTAGRPOConfig:
    """A copy whose backends AReaL can parse; ``engine`` keeps what was asked for."""
    config = copy.deepcopy(config)
    sections: list[tuple[str, Any, dict[str, str]]] = [
        ("actor", config.actor, TRAIN_BACKENDS),
        ("rollout", config.rollout, ROLLOUT_BACKENDS),
    ]
    if config.ref is not None:
        sections.append(("ref", config.ref, TRAIN_BACKENDS))
    for name, section, known in sections:
        backend = parse_backend(section.backend, f"{name}.backend", known)
        section.engine, section.backend = backend.engine, backend.areal
    return config


def to_structured(composed: Composed) -> DTAGRPOConfig:
    """Check a composed configuration against the schema and make it an object.

    Raises:
        ConfigError: unknown key (with the closest one that exists), wrong type,
            missing value, or a value that AReaL's own checks refuse.
    """
    try:
        merged = to_structured_cfg(composed.config, DTAGRPOConfig)
    except ConfigKeyError as e:
        raise ConfigError(_unknown_key(e, composed)) from e
    except (OmegaConfBaseException, ValueError) as e:
        raise ConfigError(_with_key(e)) from e
    try:
        OmegaConf.resolve(merged)
        if missing := OmegaConf.missing_keys(merged):
            # The shortest first: longer ones often refer to it.
            names = sorted(missing, key=lambda key: (key.count("."), key))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(
                f"no value for {', '.join(names[:3])}{more}; set it in the YAML"
            )
        config = OmegaConf.to_object(merged)
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError, TypeError) as e:
        raise ConfigError(_with_key(e)) from e
    assert isinstance(config, DTAGRPOConfig)
    return config


def _unknown_key(error: ConfigKeyError, composed: Composed) -> str:
    full_key = str(error.full_key or error.key)
    parent, _, key = full_key.rpartition(".")
    owner = error.object_type  # the dataclass that lacks the key
    keys = [f.name for f in dataclasses.fields(owner)] if owner else []
    if not parent:
        keys += composed.groups
    hint = did_you_mean(key, keys)
    if hint and parent:
        hint = hint.replace("mean '", f"mean '{parent}.")
    return f"unknown key {full_key!r}{hint}"


def _with_key(error: Exception) -> str:
    """The first line of OmegaConf's message behind the key that it is about."""
    if not isinstance(error, OmegaConfBaseException):
        return one_line(error)
    key = error.full_key or error.key
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{key}: {first}" if key else first
