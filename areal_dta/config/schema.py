"""Structured configuration: AReaL's configurations with our additions.

``algorithm`` chooses the class. Additions: ``dta`` (the tree engine's options) in every
model's section, ``local`` (options of the embedded server), ``collector`` (which
results are trained on), ``launch`` (time-outs), workflow, reward and data set as import
strings; and the backends ``dta:dN`` and ``local:dN``, which AReaL does not know:
`ResolvedRun.for_areal` replaces them before AReaL parses them.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from areal.api.cli_args import (
    DPOConfig,
    DPOEngineConfig,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    PPOActorConfig,
    PPOCriticConfig,
    RWConfig,
    SFTConfig,
    TeacherConfig,
    TrainEngineConfig,
    to_structured_cfg,
)
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from areal_dta.config.collector_options import CollectorOptions
from areal_dta.config.composed import (
    Composed,
    ConfigError,
    did_you_mean,
    first_line,
    one_line,
)
from areal_dta.config.engine_options import DTAOptions, fuses_prox_logp
from areal_dta.config.server_options import LocalServerConfig

ALGORITHMS: Final = ("ppo", "sft", "dpo", "rw")
"""``ppo`` stands for every algorithm that learns from rollouts: GRPO, PPO, GSPO, ..."""
# Sections that presets such as hardware=cpu also give to jobs without rollouts.
_ROLLOUT_SECTIONS: Final = ("rollout", "gconfig", "local", "collector")


@dataclass
class TreeEngineFields:
    """Mixin; our additions to each of AReaL's configurations of a training engine."""

    dta: DTAOptions = field(default_factory=DTAOptions)
    engine: str = ""
    """Set by the trainer: the engine that `backend` selected."""


@dataclass
class DTAPPOActorConfig(TreeEngineFields, PPOActorConfig):
    """Configuration of the actor, and of a reference or a teacher."""

    def should_compute_prox_logp(self) -> bool:
        """Return whether the trainer runs a forward pass for the proximal logprobs."""
        if self.engine == "dta" and fuses_prox_logp(self):
            return False
        return bool(super().should_compute_prox_logp())


@dataclass
class DTAPPOCriticConfig(TreeEngineFields, PPOCriticConfig):
    """Configuration of the critic."""


@dataclass
class DTATrainEngineConfig(TreeEngineFields, TrainEngineConfig):
    """Configuration of the model in supervised fine-tuning, or of a reward model."""


@dataclass
class DTADPOEngineConfig(TreeEngineFields, DPOEngineConfig):
    """Configuration of the model, and of its reference, in DPO."""


@dataclass
class DTATeacherConfig(TeacherConfig):
    """AReaL's teacher; `train.backend` may also be ``dta:dN``."""

    train: DTAPPOActorConfig | None = None


@dataclass
class RolloutConfig(InferenceEngineConfig):
    """AReaL's rollout configuration; `backend` may also be ``local:dN``."""

    engine: str = ""
    """Set by the trainer: the server that `backend` selected."""


@dataclass
class LaunchOptions:
    """How the launcher starts and watches the processes. Seconds throughout."""

    loopback: bool = True
    """Workers listen on 127.0.0.1 only (one machine)."""
    worker_timeout_seconds: float = 300.0
    """Maximum time until a worker process is up."""
    startup_timeout_seconds: float = 900.0
    """Maximum time until the trainer, its workers and servers are up."""
    step_timeout_seconds: float = 1800.0
    """Maximum time of one training step, the first one included."""
    grace_seconds: float | None = None
    """Time for an orderly end before processes are killed; null: 15 seconds on this
    machine, 15 minutes where a cluster's jobs have to be ended."""
    max_log_megabytes: float = 64.0
    """Size at which ``launch.log`` becomes ``launch.log.1``; four older ones stay."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name != "loopback" and value is not None and not value > 0:
                raise ValueError(f"launch.{f.name}={value}; expected a positive number")

    def limits(self, scheduler: str) -> dict[str, float]:
        """Return the options as numbers for the launcher, which knows no defaults."""
        limits = {k: v for k, v in dataclasses.asdict(self).items() if k != "loopback"}
        if self.grace_seconds is None:
            limits["grace_seconds"] = 15.0 if scheduler == "local" else 900.0
        return limits


@dataclass
class ReportOptions:
    """What a run writes beside its metrics."""

    inspect_every: int = 0
    """Write a page on every N-th batch, as ``python -m areal_dta.inspect`` makes it, to
    ``inspect/`` in the run's directory; 0: never."""

    def __post_init__(self) -> None:
        if self.inspect_every < 0:
            raise ValueError(
                f"report.inspect_every={self.inspect_every}; expected 0 (never) or a "
                "number of steps"
            )


@dataclass
class JobFields:
    """Mixin; our additions to AReaL's configuration of every experiment."""

    algorithm: str = "ppo"
    """ppo: everything that learns from rollouts (GRPO, PPO, ...); sft, dpo or rw."""
    schema: str = ""
    """Import string of a recipe's configuration class: a subclass of the algorithm's,
    with sections of its own."""
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    report: ReportOptions = field(default_factory=ReportOptions)
    dataset_fn: str = "areal_dta.tasks.gsm8k.load_dataset"
    """Import string of the function that loads the data set."""
    trust_remote_code: bool = False
    """Let a checkpoint bring code of its own. AReaL's workers would always run it, so
    that without this such a checkpoint is refused."""
    note: str = ""
    """Printed under the curve: what its rise or fall means."""


@dataclass
class DTAGRPOConfig(JobFields, GRPOConfig):
    """Learning from rollouts, with all of AReaL's GRPO configuration."""

    actor: DTAPPOActorConfig = field(default_factory=DTAPPOActorConfig)
    ref: DTAPPOActorConfig | None = None
    critic: DTAPPOCriticConfig | None = None
    teacher: DTATeacherConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    local: LocalServerConfig = field(default_factory=LocalServerConfig)
    collector: CollectorOptions = field(default_factory=CollectorOptions)
    workflow: str = "areal.workflow.rlvr.RLVRWorkflow"
    """Import string of the rollout workflow."""
    reward_fn: str = "areal_dta.tasks.math_reward.math_reward_fn"
    """Import string of the reward function."""
    group_filter: str = ""
    """Import string of a function that decides whether to train on a prompt's
    trajectories; empty: train on all."""
    enable_thinking: bool = False
    """Passed to the model's chat template."""

    def workflow_arguments(self, gconfig: GenerationHyperparameters) -> dict[str, Any]:
        """Return the rollout workflow's arguments, with import strings for functions.

        Args:
            gconfig: that of training, or that of evaluation.
        """
        return {
            "reward_fn": self.reward_fn,
            "gconfig": gconfig,
            "tokenizer": self.tokenizer_path,
            "enable_thinking": self.enable_thinking,
        }

    def num_requests_in_flight(self) -> int:
        """Maximum number of generation requests that run or wait at a time."""
        rollout = self.rollout
        prompts = rollout.max_concurrent_rollouts or rollout.consumer_batch_size
        samples = max(self.gconfig.n_samples, self.eval_gconfig.n_samples)
        # Training and evaluation have a limit each.
        return prompts * samples * (2 if self.valid_dataset is not None else 1)

    def check(self) -> None:
        """Check a recipe's own settings, before anything starts.

        Raises:
            ValueError: something cannot work; the message is one line.
        """


@dataclass
class DTASFTConfig(JobFields, SFTConfig):
    """Supervised fine-tuning."""

    algorithm: str = "sft"
    actor: DTATrainEngineConfig = field(default_factory=DTATrainEngineConfig)
    dataset_fn: str = "areal_dta.tasks.supervised.load_dataset"


@dataclass
class DTADPOConfig(JobFields, DPOConfig):
    """Direct preference optimization, on pairs."""

    algorithm: str = "dpo"
    actor: DTADPOEngineConfig = field(default_factory=DTADPOEngineConfig)
    ref: DTADPOEngineConfig = field(default_factory=DTADPOEngineConfig)
    dataset_fn: str = "areal_dta.tasks.preferences.load_dataset"


@dataclass
class DTARWConfig(JobFields, RWConfig):
    """A reward model, on pairs."""

    algorithm: str = "rw"
    actor: DTATrainEngineConfig = field(
        default_factory=lambda: DTATrainEngineConfig(is_critic=True)
    )
    dataset_fn: str = "areal_dta.tasks.preferences.load_dataset"


DTAConfig = DTAGRPOConfig | DTASFTConfig | DTADPOConfig | DTARWConfig
_CONFIG_CLASSES: Final[dict[str, type[DTAConfig]]] = {
    "ppo": DTAGRPOConfig,
    "sft": DTASFTConfig,
    "dpo": DTADPOConfig,
    "rw": DTARWConfig,
}


def config_class(composed: Composed) -> type[DTAConfig]:
    """Return the class that ``algorithm`` and ``schema`` select.

    Raises:
        ConfigError: there is no such algorithm or schema.
    """
    name = str(composed.config.get("algorithm", "ppo"))
    if name not in _CONFIG_CLASSES:
        raise ConfigError(
            f"algorithm={name}: unknown{did_you_mean(name, ALGORITHMS)}; expected one "
            f"of {', '.join(ALGORITHMS)} (ppo: GRPO and all that learn from rollouts)"
        )
    base = _CONFIG_CLASSES[name]
    path = str(composed.config.get("schema") or "")
    cls = load_object(path, "schema") if path else base
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigError(f"schema={path} is not a subclass of {base.__name__}")
    return cls


def load_object(path: str, key: str) -> Any:
    """Import ``package.module.name``.

    Args:
        key: the configuration key, for messages.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"{key}={path} cannot be imported ({one_line(e)}); "
            "expected package.module.name"
        ) from e


def to_structured(composed: Composed) -> DTAConfig:
    """Check a composed configuration against the schema and build the object.

    Raises:
        ConfigError: unknown key (with the closest one that exists), wrong type,
            missing value, or a value that AReaL's own checks refuse.
    """
    cls = config_class(composed)
    try:
        given = _without_presets(composed, cls)
        merged = to_structured_cfg(given, cls)
        _check_words(given, merged)
        OmegaConf.resolve(merged)
        if missing := OmegaConf.missing_keys(merged):
            # The shortest first: longer ones often refer to it.
            names = sorted(missing, key=lambda key: (key.count("."), key))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(
                f"no value for {', '.join(names[:3])}{more}; set it in the YAML"
            )
        config = OmegaConf.to_object(merged)
    except ConfigError:  # it is a ValueError as well
        raise
    except ConfigKeyError as e:
        raise ConfigError(_unknown_key(e, composed)) from e
    except (OmegaConfBaseException, ValueError, TypeError) as e:
        raise ConfigError(_with_key(e)) from e
    assert isinstance(config, cls)
    return config


def _check_words(given: DictConfig, merged: DictConfig, parent: str = "") -> None:
    """Refuse words that YAML 1.1 has read as booleans where a text is expected.

    Raises:
        ConfigError: names the key.
    """
    for key in given:
        if OmegaConf.is_interpolation(given, key) or OmegaConf.is_missing(given, key):
            continue
        value, read, name = given[key], merged.get(key), f"{parent}{key}"
        if isinstance(value, DictConfig) and isinstance(read, DictConfig):
            _check_words(value, read, f"{name}.")
        elif isinstance(value, bool) and isinstance(read, str):
            words = "on, yes or true" if value else "off, no or false"
            quoted = "'on'" if value else "'off'"
            raise ConfigError(
                f"{name} expects a text, and YAML reads {words} as a boolean; "
                f"quote the word ({key}: {quoted})"
            )


def _without_presets(composed: Composed, cls: type[DTAConfig]) -> DictConfig:
    """Leave out the rollout settings that config groups give to every job."""
    config = copy.copy(composed.config)
    for key in _ROLLOUT_SECTIONS:
        if issubclass(cls, DTAGRPOConfig) or key not in config:
            continue
        if key in composed.named:
            raise ConfigError(
                f"{key}: algorithm={config.algorithm} has no rollouts; leave it out"
            )
        with open_dict(config):
            del config[key]
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
    """Return the error's message, after the key that an OmegaConf error is about."""
    if not isinstance(error, OmegaConfBaseException):
        return one_line(error)
    key = error.full_key or error.key
    return f"{key}: {first_line(error)}" if key else first_line(error)
