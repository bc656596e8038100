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

from recipes.chat import ChatClient, ChatOptions
from recipes.replies import ReplyError
from recipes.tau2.api import DummyUser, Orchestrator, Role, Task, TerminationReason
from recipes.tau2.domains import Domain, agent_context, find_task
from recipes.tau2.options import Tau2Options, UserOptions
from recipes.tau2.play.agents import make_agent
from recipes.tau2.play.policies import Policy
from recipes.tau2.play.users import LLMUser, RuleUser, User, user_tools
from recipes.tau2.workers.environments import (
    LARGE_DATABASES,
    EnvironmentPool,
    RemoteEnvironment,
    build_environment,
)

T = TypeVar("T")
MakeUser = Callable[[Task], User]

_USER_REMEDY = (
    "start that server, or set tau2.user.base_url, tau2.user.timeout_seconds "
    "and tau2.user.max_retries"
)

# Eight, although there may be fewer cores: they mostly wait for files and processes.
_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="tau2")


async def off_loop(function: Callable[..., T], *args: Any) -> T:
    """Run in a thread, not on the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *args)


@dataclass(frozen=True, slots=True)
class Episode:
    """How an episode went."""

    domain: str
    task_id: str
    termination: str
    """tau2's `TerminationReason`."""
    problem: str | None
    """Problem of the agent's last reply (`replies.Problem`), if that ended it."""
    num_turns: int
    """Model calls of the agent."""
    num_tool_errors: int
    messages: tuple[Any, ...]
    """Messages as tau2 records them."""

    def scoring_request(self) -> dict[str, Any]:
        """Build the arguments of `scoring.score`, as JSON values."""
        return {
            "domain": self.domain,
            "task_id": self.task_id,
            "termination": self.termination,
            "messages": [m.model_dump(mode="json") for m in self.messages],
        }


def user_client(
    domain: Domain, options: UserOptions, http_client: Any = None
) -> ChatClient | None:
    """Build the client of the user model; None if no model plays the user."""
    if domain.solo or options.kind != "llm":
        return None
    own = ("kind", "max_replies")  # the others are named as in `ChatOptions`
    chat = ChatOptions(**{k: v for k, v in vars(options).items() if k not in own})
    return ChatClient(chat, "the user model", _USER_REMEDY, http_client)


def user_maker(
    domain: Domain, options: UserOptions, client: ChatClient | None
) -> MakeUser | None:
    """Return what builds the user of each episode; None in a solo domain.

    Args:
        client: from `user_client`.
    """
    if domain.solo:
        return None

    def make(task: Task) -> User:
        if options.kind == "rule":
            return RuleUser(task, options.max_replies)
        assert client is not None
        return LLMUser(client, task, user_tools(domain.tau2_name))

    return make


async def run_episode(
    domain: Domain,
    task_id: str,
    policy: Policy,
    make_user: MakeUser | None,
    options: Tau2Options,
    environments: EnvironmentPool | None = None,
) -> Episode:
    """Play one episode.

    An agent that breaks the rules (no message, a broken tool call, ...) ends it, as
    tau2's "agent_error", and so do too many steps or failed tool calls.

    Args:
        make_user: None in a solo domain.
        options: its limits are those of the episode.
        environments: for domains with large databases; None builds them here.

    Raises:
        EnvironmentLostError: the process of its environment has ended.
        ServerError: a model's server cannot be reached, or the user model is broken.
        TimeoutError: it took longer than the limits allow. That is not the agent's
            fault, hence no result.
    """
    timeout_seconds = options.episode_timeout_seconds
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _run(domain, task_id, policy, make_user, options, environments)
    except TimeoutError as error:
        raise TimeoutError(
            f"an episode of {domain.name} took more than {timeout_seconds:g} s; "
            "the servers are slow: raise tau2.episode_timeout_seconds or use fewer "
            "episodes at a time (rollout.max_concurrent_rollouts)"
        ) from error


async def _run(
    domain: Domain,
    task_id: str,
    policy: Policy,
    make_user: MakeUser | None,
    options: Tau2Options,
    environments: EnvironmentPool | None,
) -> Episode:
    # Set up those who take part.
    context = await off_loop(agent_context, domain.name, task_id)
    task = await off_loop(find_task, domain.name, task_id)
    agent = make_agent(task, domain.solo, context, policy)
    assert domain.solo == (make_user is None)
    user: Any = DummyUser() if make_user is None else make_user(task)
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
        max_steps=options.max_steps,
        max_errors=options.max_errors,
        solo_mode=domain.solo,
    )

    # Await each message before tau2 asks for it.
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


def _apply_limits(orchestrator: Orchestrator) -> None:
    """End the episode at a limit, like `Orchestrator.run`.

    Never between a tool call and its result.
    """
    if orchestrator.done or orchestrator.to_role == Role.ENV:
        return
    if orchestrator.step_count >= orchestrator.max_steps:
        orchestrator.done = True
        orchestrator.termination_reason = TerminationReason.MAX_STEPS
    elif orchestrator.num_errors >= orchestrator.max_errors:
        orchestrator.done = True
        orchestrator.termination_reason = TerminationReason.TOO_MANY_ERRORS
