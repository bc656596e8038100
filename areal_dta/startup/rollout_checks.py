"""The checks of `areal_dta.startup.checks` that are about learning from rollouts."""

from __future__ import annotations

from importlib.util import find_spec

from areal_dta.config.backends import Backend
from areal_dta.config.errors import ConfigError, one_line
from areal_dta.config.resolved import ResolvedRun
from areal_dta.config.schema import DTAGRPOConfig


def check_rollout(config: DTAGRPOConfig, rollout: Backend) -> None:
    if rollout.engine != "local" and find_spec(rollout.engine) is None:
        raise ConfigError(
            f"rollout.backend={config.rollout.backend}, but {rollout.engine} is not "
            f"installed; pip install {rollout.engine}, or use rollout.backend=local:d1"
        )
    if rollout.engine != "local":
        return
    if config.actor.weight_update_mode != "disk":
        raise ConfigError(
            f"actor.weight_update_mode={config.actor.weight_update_mode}, but "
            "rollout.backend=local takes weights from disk only; "
            "use actor.weight_update_mode=disk"
        )
    if config.actor.use_lora or config.rollout.use_lora:
        raise ConfigError(
            "actor.use_lora=true, but rollout.backend=local takes whole checkpoints, "
            "not adapters; use rollout.backend=sglang:dN, or actor.use_lora=false"
        )
    try:
        config.local.validate()
    except ValueError as e:
        raise ConfigError(f"local: {one_line(e)}") from e


def check_group_norms(config: DTAGRPOConfig) -> None:
    samples = config.gconfig.n_samples
    for key in ("reward_norm", "adv_norm"):
        norm = getattr(config.actor, key)
        grouped = norm is not None and "group" in (norm.mean_level, norm.std_level)
        if grouped and norm.group_size != samples:
            raise ConfigError(
                f"actor.{key}.group_size={norm.group_size} would mix prompts, since "
                f"gconfig.n_samples={samples}; set it to ${{gconfig.n_samples}}"
            )


def check_agent(config: DTAGRPOConfig) -> None:
    """What an agent's model calls become, and what its recipe asks for."""
    agent = config.rollout.agent
    wanted = {"individual": "hf", "concat": "concat"}[agent.export_style]
    if agent.chat_template_type != wanted:
        raise ConfigError(
            f"rollout.agent.export_style={agent.export_style} with chat_template_type="
            f"{agent.chat_template_type} would train some turns twice or not at all; "
            f"set rollout.agent.chat_template_type={wanted}"
        )
    try:
        config.check()
    except ValueError as e:
        raise ConfigError(one_line(e)) from e


def check_reference(config: DTAGRPOConfig) -> list[str]:
    """AReaL pays for a KL term without a reference as if it were all zero logprobs."""
    if config.ref is None and config.actor.kl_ctl > 0:
        raise ConfigError(
            f"actor.kl_ctl={config.actor.kl_ctl} needs a reference; "
            "add the section ref, or use actor.kl_ctl=0"
        )
    if config.ref is not None and config.actor.kl_ctl <= 0:
        return ["ref: not used, since actor.kl_ctl=0"]
    return []


def check_teacher(run: ResolvedRun) -> None:
    teacher = run.teacher
    if teacher is not None and find_spec(teacher.backend.engine) is None:
        engine = teacher.backend.engine
        raise ConfigError(
            f"teacher.rollout.backend={teacher.config.backend}, but {engine} is not "
            f"installed; pip install {engine}, or use teacher.engine_type=train"
        )
