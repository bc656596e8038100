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

from areal.api.cli_args import PPOActorConfig

from areal_dta.compose import (
    Composed,
    ConfigError,
    did_you_mean,
    one_line,
    usable_cpus,
)
from areal_dta.config import (
    TRAIN_BACKENDS,
    Backend,
    DTAGRPOConfig,
    actor_backend,
    parse_backend,
    rollout_backend,
)
from areal_dta.hardware import detect_hardware, num_gpus

SCHEDULERS = ("local", "ray", "slurm")
# What names directories, and keys in AReaL's name service.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def check_config(config: DTAGRPOConfig, composed: Composed) -> list[str]:
    """Run all checks; cheap ones first.

    Returns:
        One message for each setting that is switched off.

    Raises:
        ConfigError: the first thing that cannot work.
    """
    check_names(config)
    actor, rollout = actor_backend(config), rollout_backend(config)
    check_hardware(config, composed, actor, rollout)
    check_ray(config, actor, rollout)
    check_rollout(config, rollout)
    check_local_server(config, rollout)
    check_batch(config, actor)
    messages = check_engine("actor", config.actor, actor)
    if config.ref is not None:
        ref = parse_backend(config.ref.backend, "ref.backend", TRAIN_BACKENDS)
        messages += check_engine("ref", config.ref, ref)
    check_critic(config)
    check_imports(config)
    check_dataset_path(config.train_dataset.path)
    check_model_path(config.actor.path)
    return messages


def check_names(config: DTAGRPOConfig) -> None:
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
    config: DTAGRPOConfig, composed: Composed, actor: Backend, rollout: Backend
) -> None:
    gpus = num_gpus()
    local = config.scheduler.type == "local"
    if composed.choices.get("hardware") == "gpu" and local and gpus == 0:
        raise ConfigError(
            f"hardware=gpu, but {detect_hardware().reason}; use hardware=cpu"
        )
    asked = config.actor.scheduling_spec[0].gpu > 0
    if asked and local and actor.num_ranks > gpus:
        raise ConfigError(
            f"actor.backend={config.actor.backend} needs {actor.num_ranks} GPUs, this "
            f"machine has {gpus}; use fewer ranks or hardware=cpu"
        )
    if not asked and config.actor.weight_update_mode == "xccl":
        raise ConfigError(
            "actor.weight_update_mode=xccl needs GPUs; "
            "use actor.weight_update_mode=disk"
        )
    if not asked and actor.engine in ("megatron", "archon"):
        raise ConfigError(
            f"actor.backend={config.actor.backend} needs GPUs; "
            "use actor.backend=dta:d1 or fsdp:d1"
        )
    if not asked and rollout.engine != "local":
        raise ConfigError(
            f"rollout.backend={config.rollout.backend} needs a GPU; "
            "use rollout.backend=local:d1, or hardware=gpu"
        )


def check_ray(config: DTAGRPOConfig, actor: Backend, rollout: Backend) -> None:
    """Ray waits for ever, and says nothing, for CPUs that the machine lacks."""
    if config.scheduler.type != "ray" or "RAY_ADDRESS" in os.environ:
        return
    wanted = (
        actor.num_ranks * config.actor.scheduling_spec[0].cpu
        + rollout.num_ranks * config.rollout.scheduling_spec[0].cpu
    )
    if wanted > (present := usable_cpus()):
        raise ConfigError(
            f"scheduler.type=ray would wait for {wanted} CPUs, this machine has "
            f"{present}; `ray start --head --num-cpus={wanted}` and "
            "set RAY_ADDRESS=auto, or use scheduler=local"
        )


def check_rollout(config: DTAGRPOConfig, rollout: Backend) -> None:
    if rollout.engine != "local" and find_spec(rollout.engine) is None:
        raise ConfigError(
            f"rollout.backend={config.rollout.backend}, but {rollout.engine} is not "
            f"installed; pip install {rollout.engine}, or use rollout.backend=local:d1"
        )
    if rollout.engine == "local" and config.actor.weight_update_mode != "disk":
        raise ConfigError(
            f"actor.weight_update_mode={config.actor.weight_update_mode}, but "
            "rollout.backend=local takes weights from disk only; "
            "use actor.weight_update_mode=disk"
        )


def check_local_server(config: DTAGRPOConfig, rollout: Backend) -> None:
    if rollout.engine != "local":
        return
    try:
        config.local.validate()
    except ValueError as e:
        raise ConfigError(f"local: {one_line(e)}") from e


def check_batch(config: DTAGRPOConfig, actor: Backend) -> None:
    batch, dp = config.train_dataset.batch_size, actor.dp_size
    if batch % dp:
        raise ConfigError(
            f"train_dataset.batch_size={batch} prompts cannot be shared evenly by the "
            f"{dp} trainers of actor.backend={config.actor.backend}; "
            f"use a multiple of {dp}"
        )
    samples = config.gconfig.n_samples
    for key in ("reward_norm", "adv_norm"):
        norm = getattr(config.actor, key)
        grouped = norm is not None and "group" in (norm.mean_level, norm.std_level)
        if grouped and norm.group_size != samples:
            raise ConfigError(
                f"actor.{key}.group_size={norm.group_size} would mix prompts, since "
                f"gconfig.n_samples={samples}; set it to ${{gconfig.n_samples}}"
            )
    if config.total_train_steps is not None and config.total_train_steps < 1:
        raise ConfigError(
            f"total_train_steps={config.total_train_steps}; expected >= 1"
        )


def check_engine(name: str, section: PPOActorConfig, backend: Backend) -> list[str]:
    if backend.engine == "dta":
        from areal_dta.engine import check_actor_config

        try:
            return [f"{name}: {line}" for line in check_actor_config(section)]
        except ValueError as e:
            raise ConfigError(f"{name}: {one_line(e)}") from e
    needs_flash = section.attn_impl.startswith("flash_attention")
    if backend.engine == "fsdp" and needs_flash and find_spec("flash_attn") is None:
        raise ConfigError(
            f"{name}.attn_impl={section.attn_impl}, but flash-attn is not installed; "
            f"pip install flash-attn, or use {name}.attn_impl=sdpa"
        )
    return []


def check_critic(config: DTAGRPOConfig) -> None:
    if config.critic is not None and not config.critic.attn_impl.startswith("flash"):
        raise ConfigError(
            f"critic.attn_impl={config.critic.attn_impl}: AReaL's critic lets packed "
            "sequences attend to one another unless it has flash attention; "
            "leave the critic out (GRPO), or use critic.attn_impl=flash_attention_2"
        )


def check_imports(config: DTAGRPOConfig) -> None:
    for key in ("workflow", "reward_fn", "dataset_fn"):
        load_object(getattr(config, key), key)


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


def check_model_path(path: str) -> None:
    """The model's configuration can be read, from a directory or from the hub."""
    from transformers import AutoConfig

    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(f"actor.path={path} holds no config.json: not a model")
    if path.startswith(("/", "./", "../", "~")) and not os.path.isdir(path):
        raise ConfigError(f"actor.path={path}: no such directory")
    try:
        AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise ConfigError(f"actor.path={path} cannot be loaded: {_brief(e)}") from e


def num_steps(config: DTAGRPOConfig, num_prompts: int) -> int:
    """Training steps that the data and the limits allow.

    Raises:
        ConfigError: not even one.
    """
    per_epoch = num_prompts // config.train_dataset.batch_size
    if per_epoch == 0:
        raise ConfigError(
            f"train_dataset holds {num_prompts} prompts, fewer than one batch of "
            f"train_dataset.batch_size={config.train_dataset.batch_size}"
        )
    steps = per_epoch * config.total_train_epochs
    return min(steps, config.total_train_steps or steps)


def gpu_note(actor: Backend, rollout: Backend) -> Sequence[str]:
    """What the user should know about GPUs shared by training and rollouts."""
    gpus = num_gpus()
    wanted = actor.num_ranks + rollout.num_ranks
    if 0 < gpus < wanted:
        return [f"{wanted} processes share {gpus} GPUs"]
    return []


def _brief(error: Exception, limit: int = 200) -> str:
    text = one_line(error)
    return text if len(text) <= limit else text[: limit - 3] + "..."
