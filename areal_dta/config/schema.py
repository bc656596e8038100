"""Structured configuration: AReaL's configurations with our additions.

``algorithm`` chooses the class. Additions: ``actor.dta`` (the tree engine's options; of
every model on a training engine), ``local`` (the embedded rollout server's), ``launch``
(time-outs), the workflow, reward and data set as import strings; and the backends
``dta:dN`` and ``local:dN``, which AReaL does not know: `ResolvedRun.for_areal` replaces
them before AReaL parses them.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from areal.api.cli_args import (
    DPOConfig,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    RWConfig,
    SFTConfig,
    to_structured_cfg,
)
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from areal_dta.config.composed import Composed
from areal_dta.config.engine_sections import (
    DTADPOEngineConfig,
    DTAPPOActorConfig,
    DTAPPOCriticConfig,
    DTATeacherConfig,
    DTATrainEngineConfig,
)
from areal_dta.config.errors import ConfigError, did_you_mean, one_line
from areal_dta.config.server_options import LocalServerConfig

ALGORITHMS: Final = ("ppo", "sft", "dpo", "rw")
"""``ppo`` stands for all that learn from rollouts: GRPO, PPO, GSPO, SAPO, ..."""
# Sections that presets such as hardware=cpu also give to jobs without rollouts.
_ROLLOUT_SECTIONS: Final = ("rollout", "gconfig", "local")


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
class JobFields:
    """What we add to AReaL's configuration of every experiment."""

    algorithm: str = "ppo"
    schema: str = field(
        default="",
        metadata={
            "help": "Import string of a recipe's configuration class: a subclass of "
            "the algorithm's, with sections of its own."
        },
    )
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    dataset_fn: str = field(
        default="areal_dta.tasks.gsm8k.load_dataset",
        metadata={"help": "Import string of the function that loads the data set."},
    )
    note: str = field(
        default="",
        metadata={"help": "Printed under the curve: what its rise or fall means."},
    )


@dataclass
class DTAGRPOConfig(JobFields, GRPOConfig):
    """A job that learns from rollouts. All of AReaL's configuration is available."""

    actor: DTAPPOActorConfig = field(default_factory=DTAPPOActorConfig)
    ref: DTAPPOActorConfig | None = None
    critic: DTAPPOCriticConfig | None = None
    teacher: DTATeacherConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    local: LocalServerConfig = field(default_factory=LocalServerConfig)
    workflow: str = field(
        default="areal.workflow.rlvr.RLVRWorkflow",
        metadata={"help": "Import string of the rollout workflow."},
    )
    reward_fn: str = field(
        default="areal_dta.tasks.math_reward.math_reward_fn",
        metadata={"help": "Import string of the reward function."},
    )
    group_filter: str = field(
        default="",
        metadata={
            "help": "Import string of a function that says whether a prompt's "
            "trajectories are trained on; empty: all are."
        },
    )
    enable_thinking: bool = field(
        default=False, metadata={"help": "Passed to the model's chat template."}
    )

    def workflow_arguments(self, gconfig: GenerationHyperparameters) -> dict[str, Any]:
        """Of the rollout workflow; import strings, since workers make it.

        Args:
            gconfig: of training, or of evaluation.
        """
        return {
            "reward_fn": self.reward_fn,
            "gconfig": gconfig,
            "tokenizer": self.tokenizer_path,
            "enable_thinking": self.enable_thinking,
        }

    def check(self) -> None:
        """Further checks of a recipe, before anything starts.

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
    """Direct preference optimisation, on pairs."""

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
    """
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
    schema = str(composed.config.get("schema") or "")
    return _schema_class(schema, base) if schema else base


def _schema_class(path: str, base: type[DTAConfig]) -> type[DTAConfig]:
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"schema={path} cannot be imported ({one_line(e)}); "
            "expected package.module.Class"
        ) from e
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigError(f"schema={path} is not a subclass of {base.__name__}")
    return cls


def to_structured(composed: Composed) -> DTAConfig:
    """Check a composed configuration against the schema and make it an object.

    Raises:
        ConfigError: unknown key (with the closest one that exists), wrong type,
            missing value, or a value that AReaL's own checks refuse.
    """
    cls = config_class(composed)
    try:
        merged = to_structured_cfg(_without_presets(composed, cls), cls)
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
    assert isinstance(config, cls)
    return config


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
    """The first line of OmegaConf's message behind the key that it is about."""
    if not isinstance(error, OmegaConfBaseException):
        return one_line(error)
    key = error.full_key or error.key
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{key}: {first}" if key else first
