"""Refuse what cannot work on this machine before anything starts.

Each check returns nothing, or raises `ConfigError` with one line: what was got, what
was expected, and the remedy. This is the only place where a user's setting is refused
for its meaning; the schema refuses keys and types, the tree engine's own refusals are
in `areal_dta.engine.setting_checks`.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from shutil import which

from areal.utils.environ import is_single_controller

from areal_dta.areal_fixes.registry import check_versions
from areal_dta.config import lora
from areal_dta.config.composed import (
    Composed,
    ConfigError,
    did_you_mean,
    one_line,
)
from areal_dta.config.resolved import ResolvedRun, Section
from areal_dta.config.schema import DTAConfig, DTAGRPOConfig, load_object
from areal_dta.config.server_options import SPARE_FILES
from areal_dta.engine import PAIR_KINDS, VALUE_KINDS, engine_class
from areal_dta.engine.setting_checks import check_actor_config
from areal_dta.startup.check_models import (
    check_model,
    check_served_model,
    check_token_limits,
)
from areal_dta.startup.check_values import check_values
from areal_dta.startup.compose import detect_hardware, num_gpus

_EXAMPLES = {"ppo": "prompts", "sft": "examples", "dpo": "pairs", "rw": "pairs"}
SCHEDULERS = ("local", "ray", "slurm")
# Names of directories, which are also keys in AReaL's name service.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def check_run(run: ResolvedRun, composed: Composed | None = None) -> list[str]:
    """Run all checks, cheap ones first.

    Args:
        composed: what the run was composed of; None if an own script has made the
            configuration, and loads its data itself.

    Returns:
        Notes for the user, e.g. one per setting that is switched off.

    Raises:
        ConfigError: the first thing that cannot work.
    """
    config = run.config
    check_values(config)
    check_names(config)
    check_scheduler(config)
    check_versions(run)
    check_hardware(run, {} if composed is None else composed.choices)
    rollout_notes = check_rollouts(run)
    notes = []
    for model in run.models:
        check_batch(config, model)
        check_kind(model)
        notes += check_engine(model)
    for key in ("workflow", "reward_fn", "dataset_fn", "group_filter"):
        if path := getattr(config, key, ""):
            load_object(path, key)
    if composed is not None:
        check_dataset_path(config.train_dataset.path)
    check_token_limits(run)
    for model in run.models:
        notes += check_model(model, config.trust_remote_code)
    if run.rollout is not None and run.rollout.backend.engine == "local":
        check_served_model(config)
    return notes + rollout_notes + gpu_note(run)


def check_names(config: DTAConfig) -> None:
    """Check what names directories and services, and the number of steps."""
    for key in ("experiment_name", "trial_name"):
        if not _NAME.match(name := getattr(config, key)):
            raise ConfigError(
                f"{key}={name!r} names a directory; expected letters, digits, "
                "'.', '_' and '-'"
            )
    scheduler, fileroot = config.scheduler.type, config.cluster.fileroot
    if scheduler == "local" and shlex.quote(fileroot) != fileroot:
        raise ConfigError(
            f"cluster.fileroot={fileroot!r}: AReaL passes it to a shell unquoted; "
            "use one without spaces and special characters"
        )
    if scheduler not in SCHEDULERS:
        raise ConfigError(
            f"scheduler.type={scheduler}: unknown"
            f"{did_you_mean(str(scheduler), SCHEDULERS)}; "
            f"expected one of {', '.join(SCHEDULERS)}"
        )
    if config.total_train_steps is not None and config.total_train_steps < 1:
        raise ConfigError(
            f"total_train_steps={config.total_train_steps}; expected >= 1"
        )


def check_scheduler(config: DTAConfig) -> None:
    """Check that the scheduler is there and can run what it is given."""
    scheduler = config.scheduler.type
    if not is_single_controller():
        raise ConfigError(
            "AREAL_SPMD_MODE is set, but a run has a single controller; unset it"
        )
    if scheduler == "slurm" and (
        missing := [c for c in ("sbatch", "squeue", "scancel") if which(c) is None]
    ):
        raise ConfigError(
            f"scheduler.type=slurm, but this machine has no {', '.join(missing)}; run "
            "where Slurm is installed, or use scheduler=local"
        )
    if scheduler != "ray" or not isinstance(config, DTAGRPOConfig):
        return
    if uses_agent_proxy(config):
        raise ConfigError(
            f"workflow={config.workflow} is an agent, whose model calls go through a "
            "proxy, and AReaL's Ray scheduler cannot start one; use scheduler=local or "
            "slurm, or a RolloutWorkflow"
        )


def uses_agent_proxy(config: DTAGRPOConfig) -> bool:
    """Return whether rollouts go through AReaL's agent proxy."""
    from areal.api import RolloutWorkflow

    workflow = load_object(config.workflow, "workflow")
    is_class = isinstance(workflow, type) and issubclass(workflow, RolloutWorkflow)
    is_online = config.rollout.agent.mode == "online"
    return is_online or not (is_class or isinstance(workflow, RolloutWorkflow))


def check_hardware(run: ResolvedRun, choices: Mapping[str, str]) -> None:
    """Check that the machine has the GPUs that the run asks for.

    Args:
        choices: the option taken for each config group.
    """
    gpus = num_gpus()
    is_local = run.config.scheduler.type == "local"
    if choices.get("hardware") == "gpu" and is_local and gpus == 0:
        raise ConfigError(f"hardware=gpu, but {detect_hardware()[1]}; use hardware=cpu")
    for model in run.models:
        key, backend = f"{model.name}.backend={model.config.backend}", model.backend
        uses_gpus = model.config.scheduling_spec[0].gpu > 0
        if uses_gpus and is_local and backend.num_ranks > gpus:
            raise ConfigError(
                f"{key} needs {backend.num_ranks} GPUs, this machine has {gpus}; "
                "use fewer ranks or hardware=cpu"
            )
        if not uses_gpus and backend.engine in ("megatron", "archon"):
            raise ConfigError(
                f"{key} needs GPUs; use {model.name}.backend=dta:d1 or fsdp:d1"
            )
        if backend.engine == "dta":
            _check_kernel(model, uses_gpus)
    if run.rollout is None or run.actor.config.scheduling_spec[0].gpu > 0:
        return
    if run.actor.config.weight_update_mode == "xccl":
        raise ConfigError(
            "actor.weight_update_mode=xccl needs GPUs; "
            "use actor.weight_update_mode=disk"
        )
    if run.rollout.backend.engine != "local":
        raise ConfigError(
            f"rollout.backend={run.rollout.config.backend} needs a GPU; "
            "use rollout.backend=local:d1, or hardware=gpu"
        )


def _check_kernel(model: Section, uses_gpus: bool) -> None:
    """Check that the kernels that are asked for run on the trainers' device.

    Whether Triton and the card are right for them, a worker finds out as it starts.
    """
    kernel, fused = model.config.dta.kernel, model.config.dta.fused_layers
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    is_for_gpus = kernel in ("flash_cuda", "flash_triton")
    is_for_gpus |= kernel == "triton_tree" and not is_interpreted
    if (is_for_gpus and not uses_gpus) or (kernel == "flash_cpu" and uses_gpus):
        raise ConfigError(
            f"{model.name}.dta.kernel={kernel}, but {model.name} trains on "
            f"{'GPUs' if uses_gpus else 'CPUs'}; use {model.name}.dta.kernel=auto"
        )
    if fused == "on" and not uses_gpus and not is_interpreted:
        raise ConfigError(
            f"{model.name}.dta.fused_layers=on, but {model.name} trains on CPUs; use "
            f"{model.name}.dta.fused_layers=auto"
        )


def check_rollouts(run: ResolvedRun) -> list[str]:
    """Run the checks for learning from rollouts; return notes for the user."""
    if not isinstance(run.config, DTAGRPOConfig):
        return []
    assert run.rollout is not None
    check_installed(run.rollout, "rollout.backend=local:d1")
    if run.rollout.backend.engine == "local":
        check_embedded_server(run.config)
    check_group_norms(run.config)
    if run.teacher is not None:
        check_installed(run.teacher, "teacher.engine_type=train")
    check_agent(run.config)
    return check_reference(run.config)


def check_installed(server: Section, otherwise: str) -> None:
    engine = server.backend.engine
    if engine != "local" and find_spec(engine) is None:
        raise ConfigError(
            f"{server.name}.backend={server.config.backend}, but {engine} is not "
            f"installed; pip install {engine}, or use {otherwise}"
        )


def check_embedded_server(config: DTAGRPOConfig) -> None:
    if config.actor.weight_update_mode != "disk":
        raise ConfigError(
            f"actor.weight_update_mode={config.actor.weight_update_mode}, but "
            "rollout.backend=local takes weights from disk only; "
            "use actor.weight_update_mode=disk"
        )
    lora.check_served(config)
    try:
        config.local.validate()
    except ValueError as e:
        raise ConfigError(f"local: {one_line(e)}") from e
    _check_queue(config)


def _check_queue(config: DTAGRPOConfig) -> None:
    """Compare what the run can have in flight with what a server can hold."""
    needed = config.num_requests_in_flight()
    what = (
        f"{needed} requests can be in flight (rollout.max_concurrent_rollouts or "
        "consumer_batch_size, times the larger n_samples)"
    )
    if config.local.queue_limit(needed) < needed:
        raise ConfigError(
            f"{what}, but local.max_queued_requests="
            f"{config.local.max_queued_requests}; leave it out, or lower "
            "rollout.max_concurrent_rollouts"
        )
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and needed + SPARE_FILES > limit:
        raise ConfigError(
            f"{what}, but a process may have only {limit} files and connections open; "
            "raise the limit (ulimit -Hn), or lower rollout.max_concurrent_rollouts"
        )


def check_group_norms(config: DTAGRPOConfig) -> None:
    """Check that a group over which is normalized is one prompt's samples."""
    samples = config.gconfig.n_samples
    for key in ("reward_norm", "adv_norm"):
        norm = getattr(config.actor, key)
        is_grouped = norm is not None and "group" in (norm.mean_level, norm.std_level)
        if is_grouped and norm.group_size != samples:
            raise ConfigError(
                f"actor.{key}.group_size={norm.group_size} would mix prompts, since "
                f"gconfig.n_samples={samples}; set it to ${{gconfig.n_samples}}"
            )


def check_agent(config: DTAGRPOConfig) -> None:
    """Check how an agent's model calls become sequences, and what its recipe asks."""
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
    """Check that a KL term has its reference, and the reference a KL term."""
    # AReaL computes a KL term without a reference as if its logprobs were all 0.
    if config.ref is None and config.actor.kl_ctl > 0:
        raise ConfigError(
            f"actor.kl_ctl={config.actor.kl_ctl} needs a reference; "
            "add the section ref, or use actor.kl_ctl=0"
        )
    if config.ref is not None and config.actor.kl_ctl <= 0:
        return ["ref: not used, since actor.kl_ctl=0"]
    return []


def check_batch(config: DTAConfig, model: Section) -> None:
    """Check that a batch can be shared evenly where the engine needs that."""
    batch, dp_size = config.train_dataset.batch_size, model.backend.dp_size
    ours = engine_class(model.kind, model.backend.engine, model.config.attn_impl)
    if config.algorithm == "ppo" and ours is not None:
        return  # our engines deal sequences to ranks, whatever the number of prompts
    if batch % dp_size:
        raise ConfigError(
            f"train_dataset.batch_size={batch} {_EXAMPLES[config.algorithm]} cannot be "
            f"shared evenly by the {dp_size} trainers of "
            f"{model.name}.backend={model.config.backend}; use a multiple of {dp_size}"
        )


def check_kind(model: Section) -> None:
    """Check settings that the algorithm needs, whatever the engine."""
    name, config = model.name, model.config
    is_critic = model.kind in VALUE_KINDS
    if bool(config.is_critic) is not is_critic:
        what = "values" if is_critic else "a language model"
        raise ConfigError(
            f"{name}.is_critic={str(config.is_critic).lower()}, but {name} is to train "
            f"{what}; set {name}.is_critic={str(is_critic).lower()}"
        )
    if model.kind in PAIR_KINDS and config.mb_spec.granularity != 2:
        raise ConfigError(
            f"{name}.mb_spec.granularity={config.mb_spec.granularity} would tear pairs "
            f"apart; set {name}.mb_spec.granularity=2"
        )
    if model.kind == "rw" and model.backend.engine not in ("dta", "fsdp"):
        raise ConfigError(
            f"{name}.backend={config.backend}: AReaL's reward models fail with a "
            f"KeyError in 1.0.4 except here; use {name}.backend=dta:dN or fsdp:dN"
        )


def check_engine(model: Section) -> list[str]:
    """Check the engine's options; return a note per setting that is switched off."""
    name, config, engine = model.name, model.config, model.backend.engine
    if engine == "dta":
        try:
            return [f"{name}: {line}" for line in check_actor_config(config)]
        except ValueError as e:
            raise ConfigError(f"{name}: {one_line(e)}") from e
    needs_flash = config.attn_impl.startswith("flash_attention")
    is_fsdp = engine in ("fsdp", "areal-fsdp")
    if is_fsdp and needs_flash and find_spec("flash_attn") is None:
        raise ConfigError(
            f"{name}.attn_impl={config.attn_impl}, but flash-attn is not installed; "
            f"pip install flash-attn, or use {name}.attn_impl=sdpa"
        )
    if engine == "areal-fsdp" and not needs_flash:
        return [
            f"{name}: AReaL's engine packs sequences, and {config.attn_impl} lets each "
            "see those before it (logprobs off by 0.1 to 0.3); one sequence per "
            f"micro-batch is exact: {name}.mb_spec.n_mbs=<sequences per rank>"
        ]
    return []


def check_dataset_path(path: str) -> None:
    """Check that a path that looks like a file is one; other names are the loader's."""
    looks_like_file = path.endswith((".jsonl", ".json")) or path.startswith(("/", "."))
    if looks_like_file and not os.path.exists(path):
        raise ConfigError(
            f"train_dataset.path={path}: no such file; expected embedded, "
            "a GSM8K JSONL file, or openai/gsm8k"
        )


def num_steps(config: DTAConfig, num_examples: int) -> int:
    """Return the number of training steps that the data and the limits allow.

    Raises:
        ConfigError: the data set is smaller than one batch.
    """
    batch_size = config.train_dataset.batch_size
    per_epoch = num_examples // batch_size
    if per_epoch == 0:
        raise ConfigError(
            f"train_dataset holds {num_examples} {_EXAMPLES[config.algorithm]}, fewer "
            f"than one batch of train_dataset.batch_size={batch_size}"
        )
    steps = per_epoch * config.total_train_epochs
    return min(steps, config.total_train_steps or steps)


def gpu_note(run: ResolvedRun) -> list[str]:
    """Return what the user should know about GPUs shared by training and rollouts."""
    gpus = num_gpus()
    servers = [run.rollout] if run.rollout is not None else []
    wanted = sum(pool.backend.num_ranks for pool in (*run.models, *servers))
    return [f"{wanted} processes share {gpus} GPUs"] if 0 < gpus < wanted else []
