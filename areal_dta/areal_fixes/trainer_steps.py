"""What AReaL's PPO trainer leaves out of a step, or of its start.

`registry` has each fault and its remedy, by the names of these functions.
"""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from aiohttp import ClientError
from areal.api.cli_args import AgentConfig, InferenceEngineConfig
from areal.infra.rpc.rtensor import RTensor
from areal.infra.utils.concurrent import run_async_task
from areal.utils import logging, name_resolve, names

from areal_dta.areal_fixes.registry import wrapped
from areal_dta.config.resolved import ResolvedRun

logger = logging.getLogger("TrainerSteps")

Call = Callable[..., Any]

_NO_LIMIT = int(1e12)  # as AReaL has it for evaluation


def saved_together(saver: Any) -> AbstractContextManager[None]:
    """Let AReaL's saver decide once whether it is time, for actor and critic alike."""

    def answered_once(check: Call) -> Call:
        answers: list[Any] = []

        def answered(*args: Any, **kwargs: Any) -> Any:
            if not answers:
                answers.append(check(*args, **kwargs))
            return answers[0]

        return answered

    return wrapped(saver.freq_ctl, "check", answered_once)


def critic_stats(critic: Any) -> Mapping[str, float]:
    """Return what the critic's controller has to tell; nothing without a critic."""
    if critic is None:
        return {}
    stats = critic._custom_function_call("export_stats")
    own = "ppo_critic/"
    return {k if k.startswith(own) else f"critic/{k}": v for k, v in stats.items()}


def teacher_cleared(actor: Any, teacher: Any) -> AbstractContextManager[None]:
    """Let a teacher's workers forget a batch when the actor's do.

    Args:
        teacher: a training controller; None where there is none.
    """
    if teacher is None:
        return nullcontext()

    def clear_both(clear: Call) -> Call:
        def cleared(rollout_batch: Any, *more: Any) -> None:
            clear(rollout_batch, *more)
            teacher.clear_batches(rollout_batch)

        return cleared

    return wrapped(actor, "clear_batches", clear_both)


def free_results(controller: Any) -> None:
    """Free the tensors of a controller's results once somebody has waited for them.

    For rollouts of which only the statistics are used.
    """
    wait = controller.wait

    def wait_and_free(*args: Any, **kwargs: Any) -> Any:
        results = wait(*args, **kwargs)
        free_tensors(results)
        return results

    controller.wait = wait_and_free


def free_tensors(results: Any) -> None:
    """Free what nobody needs any more, on the workers that hold it.

    Best effort: a worker that does not answer keeps its tensors until it ends.
    """
    for address, shards in RTensor.collect_shards(results).items():
        try:
            run_async_task(RTensor.clear_node, address, shards)
        except (OSError, RuntimeError, ClientError) as error:
            logger.warning(
                f"{len(shards)} tensors on {address} were not freed: {error!r}"
            )


def staleness_control_at_controller(scheduler: Any) -> AbstractContextManager[None]:
    """Let rollout workers that are created meanwhile start whatever they are sent.

    Their controller alone decides when a rollout may start.

    Args:
        scheduler: one of AReaL's.
    """

    def without_limit(create: Call) -> Call:
        async def create_engine(*args: Any, **kwargs: Any) -> Any:
            if isinstance(config := kwargs.get("config"), InferenceEngineConfig):
                config = copy.deepcopy(config)
                config.max_head_offpolicyness = _NO_LIMIT
                kwargs["config"] = config
            return await create(*args, **kwargs)

        return create_engine

    return wrapped(scheduler, "create_engine", without_limit)


def with_secret_key(run: ResolvedRun) -> ResolvedRun:
    """Return a copy whose agent proxy has a key that only this run knows."""
    run = copy.deepcopy(run)
    assert run.rollout is not None
    agent = run.rollout.config.agent
    if agent.admin_api_key == AgentConfig.admin_api_key:
        agent.admin_api_key = secrets.token_urlsafe(32)
    return run


def start_name_service(config: Any) -> None:
    """Set up AReaL's name service, without entries of an earlier run."""
    os.makedirs(config.cluster.name_resolve.nfs_record_root, exist_ok=True)
    name_resolve.reconfigure(config.cluster.name_resolve)
    trial = names.trial_root(config.experiment_name, config.trial_name)
    name_resolve.clear_subtree(trial)
