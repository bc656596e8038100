"""Find out before anything starts that a configuration cannot work on this machine.

Each check returns nothing or raises `ConfigError` with one line: what was got, what
was expected, and the remedy.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from areal_dta.areal_fixes.registry import check_versions
from areal_dta.config.backends import Backend
from areal_dta.config.composed import Composed
from areal_dta.config.errors import ConfigError, did_you_mean, one_line
from areal_dta.config.resolved import ResolvedRun, Section
from areal_dta.config.schema import (
    DTAConfig,
    DTAGRPOConfig,
)
from areal_dta.engine import PAIR_KINDS, VALUE_KINDS, engine_class
from areal_dta.startup.hardware import detect_hardware, num_gpus
from areal_dta.startup.rollout_checks import (
    check_agent,
    check_group_norms,
    check_reference,
    check_rollout,
    check_teacher,
)

_ROWS = {"ppo": "prompts", "sft": "examples", "dpo": "pairs", "rw": "pairs"}
SCHEDULERS = ("local", "ray", "slurm")
# What names directories, and keys in AReaL's name service.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def check_config(run: ResolvedRun, composed: Composed) -> list[str]:
    """Run all checks; cheap ones first.

    Returns:
        One message for each setting that is switched off.

    Raises:
        ConfigError: the first thing that cannot work.
    """
    config, sections = run.config, run.models
    check_names(config)
    check_versions(run)
    rollout = run.rollout.backend if run.rollout is not None else None
    check_hardware(config, composed, sections, rollout)
    if isinstance(config, DTAGRPOConfig):
        assert rollout is not None
        check_rollout(config, rollout)
        check_group_norms(config)
        check_teacher(run)
        check_agent(config)
    check_steps(config)
    messages = []
    for section in sections:
        check_batch(config, section)
        check_kind(section)
        messages += check_engine(section)
    if isinstance(config, DTAGRPOConfig):
        messages += check_reference(config)
    check_imports(config)
    check_dataset_path(config.train_dataset.path)
    for section in sections:
        check_model_path(section.config.path, f"{section.name}.path")
        check_experts(section)
    return messages + gpu_note(run)


def check_names(config: DTAConfig) -> None:
    for key in ("experiment_name", "trial_name"):
        if not _NAME.match(name := getattr(config, key)):
            raise ConfigError(
                f"{key}={name!r} names a directory; expected letters, digits, "
                "'.', '_' and '-'"
            )
    fileroot = config.cluster.fileroot
    if config.scheduler.type == "local" and shlex.quote(fileroot) != fileroot:
        raise ConfigError(
            f"cluster.fileroot={fileroot!r}: AReaL passes it to a shell unquoted; "
            "use one without spaces and special characters"
        )
    if config.scheduler.type not in SCHEDULERS:
        hint = did_you_mean(str(config.scheduler.type), SCHEDULERS)
        raise ConfigError(
            f"scheduler.type={config.scheduler.type}: unknown{hint}; "
            f"expected one of {', '.join(SCHEDULERS)}"
        )


def check_hardware(
    config: DTAConfig,
    composed: Composed,
    sections: Sequence[Section],
    rollout: Backend | None,
) -> None:
    gpus = num_gpus()
    local = config.scheduler.type == "local"
    if composed.choices.get("hardware") == "gpu" and local and gpus == 0:
        raise ConfigError(
            f"hardware=gpu, but {detect_hardware().reason}; use hardware=cpu"
        )
    for section in sections:
        key = f"{section.name}.backend={section.config.backend}"
        backend = section.backend
        asked = section.config.scheduling_spec[0].gpu > 0
        if asked and local and backend.num_ranks > gpus:
            raise ConfigError(
                f"{key} needs {backend.num_ranks} GPUs, this machine has {gpus}; "
                "use fewer ranks or hardware=cpu"
            )
        if not asked and backend.engine in ("megatron", "archon"):
            raise ConfigError(
                f"{key} needs GPUs; use {section.name}.backend=dta:d1 or fsdp:d1"
            )
    if rollout is None or config.actor.scheduling_spec[0].gpu > 0:
        return
    if config.actor.weight_update_mode == "xccl":
        raise ConfigError(
            "actor.weight_update_mode=xccl needs GPUs; "
            "use actor.weight_update_mode=disk"
        )
    if rollout.engine != "local":
        raise ConfigError(
            f"rollout.backend={config.rollout.backend} needs a GPU; "
            "use rollout.backend=local:d1, or hardware=gpu"
        )


def check_batch(config: DTAConfig, section: Section) -> None:
    # With our engines sequences are dealt to trainers, whatever the number of prompts.
    batch, backend = config.train_dataset.batch_size, section.backend
    dp = backend.dp_size
    ours = engine_class(section.kind, backend.engine, section.config.attn_impl)
    if config.algorithm == "ppo" and ours is not None:
        return
    if batch % dp:
        raise ConfigError(
            f"train_dataset.batch_size={batch} {_ROWS[config.algorithm]} cannot be "
            f"shared evenly by the {dp} trainers of "
            f"{section.name}.backend={section.config.backend}; use a multiple of {dp}"
        )


def check_steps(config: DTAConfig) -> None:
    if config.total_train_steps is not None and config.total_train_steps < 1:
        raise ConfigError(
            f"total_train_steps={config.total_train_steps}; expected >= 1"
        )


def check_kind(section: Section) -> None:
    """Settings that an algorithm needs whatever the engine."""
    name, config = section.name, section.config
    wanted = section.kind in VALUE_KINDS
    if bool(config.is_critic) is not wanted:
        what = "values" if wanted else "a language model"
        raise ConfigError(
            f"{name}.is_critic={str(config.is_critic).lower()}, but {name} is to train "
            f"{what}; set {name}.is_critic={str(wanted).lower()}"
        )
    if section.kind in PAIR_KINDS and config.mb_spec.granularity != 2:
        raise ConfigError(
            f"{name}.mb_spec.granularity={config.mb_spec.granularity} would tear pairs "
            f"apart; set {name}.mb_spec.granularity=2"
        )
    if section.kind == "rw" and section.backend.engine not in ("dta", "fsdp"):
        raise ConfigError(
            f"{name}.backend={config.backend}: AReaL's reward models fail with a "
            f"KeyError in 1.0.4 except here; use {name}.backend=dta:dN or fsdp:dN"
        )


def check_engine(section: Section) -> list[str]:
    name, config, engine = section.name, section.config, section.backend.engine
    if engine == "dta":
        from areal_dta.engine import check_actor_config

        try:
            return [f"{name}: {line}" for line in check_actor_config(config)]
        except ValueError as e:
            raise ConfigError(f"{name}: {one_line(e)}") from e
    needs_flash = config.attn_impl.startswith("flash_attention")
    if engine == "fsdp" and needs_flash and find_spec("flash_attn") is None:
        raise ConfigError(
            f"{name}.attn_impl={config.attn_impl}, but flash-attn is not installed; "
            f"pip install flash-attn, or use {name}.attn_impl=sdpa"
        )
    return []


def check_experts(section: Section) -> None:
    """`dta.router_load` counts experts, so there have to be some."""
    from transformers import AutoConfig

    if section.backend.engine != "dta" or not section.config.dta.router_load:
        return
    model = AutoConfig.from_pretrained(section.config.path)
    if not any("expert" in key for key in model.to_dict()):
        raise ConfigError(
            f"{section.name}.dta.router_load=true, but {section.config.path} "
            f"({model.model_type}) has no experts; set it false"
        )


def check_imports(config: DTAConfig) -> None:
    for key in ("workflow", "reward_fn", "dataset_fn", "group_filter"):
        if path := getattr(config, key, ""):
            load_object(path, key)


def load_object(path: str, key: str) -> Any:
    """Import ``package.module.name``.

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


def check_dataset_path(path: str) -> None:
    """A path that looks like a file must be one; other names are the loader's."""
    looks_like_file = path.endswith((".jsonl", ".json")) or path.startswith(("/", "."))
    if looks_like_file and not os.path.exists(path):
        raise ConfigError(
            f"train_dataset.path={path}: no such file; expected embedded, "
            "a GSM8K JSONL file, or openai/gsm8k"
        )


def check_model_path(path: str, key: str = "actor.path") -> None:
    """The model's configuration can be read, from a directory or from the hub."""
    from transformers import AutoConfig

    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(f"{key}={path} holds no config.json: not a model")
    if path.startswith(("/", "./", "../", "~")) and not os.path.isdir(path):
        raise ConfigError(f"{key}={path}: no such directory")
    try:
        AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{key}={path} cannot be loaded: {_brief(e)}") from e


def num_steps(config: DTAConfig, num_rows: int) -> int:
    """Training steps that the data and the limits allow.

    Raises:
        ConfigError: not even one.
    """
    per_epoch = num_rows // config.train_dataset.batch_size
    if per_epoch == 0:
        raise ConfigError(
            f"train_dataset holds {num_rows} {_ROWS[config.algorithm]}, fewer than one "
            "batch of "
            f"train_dataset.batch_size={config.train_dataset.batch_size}"
        )
    steps = per_epoch * config.total_train_epochs
    return min(steps, config.total_train_steps or steps)


def gpu_note(run: ResolvedRun) -> list[str]:
    """What the user should know about GPUs shared by training and rollouts."""
    gpus = num_gpus()
    wanted = sum(section.backend.num_ranks for section in run.models)
    wanted += run.rollout.backend.num_ranks if run.rollout is not None else 0
    if 0 < gpus < wanted:
        return [f"{wanted} processes share {gpus} GPUs"]
    return []


def _brief(error: Exception, limit: int = 200) -> str:
    text = one_line(error)
    return text if len(text) <= limit else text[: limit - 3] + "..."
