"""One episode: an agent and a user in an environment, until one of them stops.

Whatever may take long (reading a database of megabytes, replaying a history, tools)
runs in threads, so that the event loop stays free for the other episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from recipes.replies import ReplyError
from recipes.tau2.agents import make_agent
from recipes.tau2.api import (
    Environment,
    Orchestrator,
    Role,
    Task,
    TerminationReason,
    registry,
)
from recipes.tau2.domains import Domain, agent_context, find_task
from recipes.tau2.environments import (
    LARGE_DATABASES,
    EnvironmentPool,
    RemoteEnvironment,
)
from recipes.tau2.policies import Policy
from recipes.tau2.users import User, solo_user

T = TypeVar("T")

# They wait for files and processes most of the time.
_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="tau2")


async def off_loop(function: Callable[..., T], *args: Any) -> T:
    """Run in a thread, not on the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *args)


@dataclass(frozen=True, slots=True)
class Limits:
    """When an episode is ended from outside."""

    max_steps: int = 100
    """Messages and tool results; tau2's own limit."""
    max_errors: int = 10
    """Failed tool calls; tau2's own limit."""
    timeout_seconds: float = 3600.0
    """Wall clock. Nobody's fault, hence no result but an error."""


@dataclass(frozen=True, slots=True)
class Episode:
    """How an episode went."""

    domain: str
    task_id: str
    termination: str
    """tau2's `TerminationReason`."""
    problem: str | None
    """Of the agent's last reply (`replies.Problem`), if that ended the episode."""
    num_turns: int
    """Model calls of the agent."""
    num_tool_errors: int
    messages: tuple[Any, ...]
    """As tau2 records them."""


MakeUser = Callable[[Task], User]


async def run_episode(
    domain: Domain,
    task_id: str,
    policy: Policy,
    make_user: MakeUser | None,
    limits: Limits,
    environments: EnvironmentPool | None = None,
) -> Episode:
    """Play one episode.

    An agent that breaks the rules (no message, a broken tool call, ...) ends it, as
    tau2's "agent_error", and so do too many steps or failed tool calls.

    Args:
        make_user: None in a solo domain.
        environments: for domains with large databases; None builds them here.

    Raises:
        EnvironmentLostError: the process of its environment has ended.
        ServerError: a model's server cannot be reached, or the user model is broken.
        TimeoutError: it took longer than the limits allow.
    """
    try:
        async with asyncio.timeout(limits.timeout_seconds):
            return await _run(domain, task_id, policy, make_user, limits, environments)
    except TimeoutError as error:
        raise TimeoutError(
            f"an episode of {domain.name} took more than {limits.timeout_seconds:g} s; "
            "the servers are slow: raise tau2.episode_timeout_seconds or use fewer "
            "episodes at a time (rollout.max_concurrent_rollouts)"
        ) from error


async def _run(
    domain: Domain,
    task_id: str,
    policy: Policy,
    make_user: MakeUser | None,
    limits: Limits,
    environments: EnvironmentPool | None,
) -> Episode:
    context = await off_loop(agent_context, domain.name, task_id)
    task = await off_loop(find_task, domain.name, task_id)
    agent = make_agent(task, domain.solo, context, policy)
    assert domain.solo == (make_user is None)
    user: Any = solo_user() if make_user is None else make_user(task)
    environment: Any
    if environments is not None and domain.tau2_name in LARGE_DATABASES:
        environment = environments.make(domain, task_id)
    else:
        environment = await off_loop(build_environment, domain)
    orchestrator = Orchestrator(
        domain=domain.tau2_name,
        agent=agent,
        user=user,
        environment=environment,
        task=task,
        max_steps=limits.max_steps,
        max_errors=limits.max_errors,
        solo_mode=domain.solo,
    )
    problem = None
    try:
        if domain.solo:  # tau2 asks for the first message while it initialises
            await agent.prepare(None)
        await off_loop(orchestrator.initialize)
        while not orchestrator.done:
            if orchestrator.to_role == Role.AGENT:
                await agent.prepare(orchestrator.message)
            elif orchestrator.to_role == Role.USER:
                await user.prepare(orchestrator.message)
            await off_loop(orchestrator.step)
            _apply_limits(orchestrator)
    except ReplyError as error:
        problem = error.problem.value
        orchestrator.termination_reason = TerminationReason.AGENT_ERROR
    finally:
        if isinstance(environment, RemoteEnvironment):
            await off_loop(environment.close)
    return Episode(
        domain=domain.name,
        task_id=task_id,
        termination=orchestrator.termination_reason.value,
        problem=problem,
        num_turns=agent.num_turns,
        num_tool_errors=orchestrator.num_errors,
        messages=tuple(await off_loop(orchestrator.get_trajectory)),
    )


def build_environment(domain: Domain) -> Environment:
    """A fresh environment, its database read anew."""
    constructor = registry.get_env_constructor(domain.tau2_name)
    return constructor(solo_mode=True) if domain.solo else constructor()


def _apply_limits(orchestrator: Orchestrator) -> None:
    """As `Orchestrator.run`: never between a tool call and its result."""
    if orchestrator.done or orchestrator.to_role == Role.ENV:
        return
    if orchestrator.step_count >= orchestrator.max_steps:
        orchestrator.done = True
        orchestrator.termination_reason = TerminationReason.MAX_STEPS
    elif orchestrator.num_errors >= orchestrator.max_errors:
        orchestrator.done = True
        orchestrator.termination_reason = TerminationReason.TOO_MANY_ERRORS
