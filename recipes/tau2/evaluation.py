"""Plays a set of tasks with one policy, and reports on it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from recipes.chat import ChatClient, ChatOptions
from recipes.tau2.api import pass_hat_k
from recipes.tau2.domains import Domain, find_task
from recipes.tau2.options import Tau2Options, UserOptions
from recipes.tau2.play.episode import (
    Episode,
    MakeUser,
    run_episode,
    user_client,
    user_maker,
)
from recipes.tau2.play.policies import (
    ChatPolicy,
    GoldPolicy,
    GoldScript,
    Policy,
    RefusePolicy,
)
from recipes.tau2.play.users import GoldUser
from recipes.tau2.workers.environments import EnvironmentPool
from recipes.tau2.workers.rewards import Reward, RewardPool


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an evaluation."""

    domain: Domain
    task_ids: tuple[str, ...]
    policy: str
    """One of `evaluate.SCRIPTS`, or a URL."""
    options: Tau2Options
    trials: int = 1
    concurrency: int = 16
    chat: ChatOptions | None = None
    """Request settings of the policy, if that is a URL."""


Played = tuple[Episode, Reward]


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a policy on the tasks."""

    domain: str
    policy: str
    num_tasks: int
    trials: int
    pass_hat: dict[int, float]
    floor: float
    """Share of the tasks on which doing nothing succeeds."""
    mean_turns: float
    terminations: dict[str, int]
    problems: dict[str, int]
    num_unjudged: int


async def play(
    settings: Settings, pool: RewardPool, environments: EnvironmentPool
) -> list[Played]:
    """Play every task `trials` times, `concurrency` episodes at a time.

    Raises:
        ServerError: a model's server failed.
    """
    gate = asyncio.Semaphore(settings.concurrency)
    client: ChatClient | None = None
    users: ChatClient | None = None
    if settings.chat is not None:
        remedy = "start that server, or name another with --policy"
        client = ChatClient(settings.chat, "the policy", remedy)
        users = user_client(settings.domain, settings.options.user)

    async def one(task_id: str) -> Played:
        async with gate:
            episode = await _play_one(settings, task_id, client, users, environments)
            reward = await pool.score(episode.scoring_request())
        return replace(episode, messages=()), reward  # all that is reported

    tasks = [
        asyncio.create_task(one(task_id))
        for task_id in settings.task_ids
        for _ in range(settings.trials)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        # The first failure ends all; after a success there is nothing to cancel.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for used in (client, users):
            if used is not None:
                await used.close()


async def _play_one(
    settings: Settings,
    task_id: str,
    client: ChatClient | None,
    users: ChatClient | None,
    environments: EnvironmentPool,
) -> Episode:
    domain, options = settings.domain, settings.options
    policy: Policy
    make_user: MakeUser | None
    if client is not None:
        policy = ChatPolicy(client)
        make_user = user_maker(domain, options.user, users)
    elif settings.policy == "gold":
        script = GoldScript(find_task(domain.name, task_id))
        policy = GoldPolicy(script, domain.solo)
        make_user = None if domain.solo else lambda task: GoldUser(script)
    else:
        policy = RefusePolicy(domain.solo)
        make_user = user_maker(domain, UserOptions(kind="rule", max_replies=1), None)
    return await run_episode(domain, task_id, policy, make_user, options, environments)


async def evaluate(settings: Settings) -> Report:
    """Play the tasks, and once more with `refuse` for the floor.

    Raises:
        ServerError: a model's server failed.
    """
    options = settings.options
    with (
        RewardPool(options.reward_processes, options.reward_timeout_seconds) as pool,
        EnvironmentPool(options.environment_processes) as environments,
    ):
        played = await play(settings, pool, environments)
        nothing = played
        if settings.policy != "refuse":
            nothing = await play(
                replace(settings, policy="refuse", trials=1, chat=None),
                pool,
                environments,
            )
    return report(settings, played, nothing)


def report(
    settings: Settings, played: Sequence[Played], nothing: Sequence[Played]
) -> Report:
    """Summarize the episodes.

    Args:
        nothing: what the `refuse` policy reached on the same tasks.
    """
    successes = Counter(e.task_id for e, reward in played if reward.value > 1 - 1e-6)
    ends = Counter(episode.termination for episode, _ in played)
    problems = Counter(e.problem for e, _ in played if e.problem)
    ids, trials = settings.task_ids, settings.trials
    return Report(
        domain=settings.domain.name,
        policy=settings.policy,
        num_tasks=len(ids),
        trials=trials,
        pass_hat={
            k: sum(pass_hat_k(trials, successes[i], k) for i in ids) / len(ids)
            for k in range(1, trials + 1)
        },
        floor=sum(reward.value for _, reward in nothing) / len(nothing),
        mean_turns=sum(episode.num_turns for episode, _ in played) / len(played),
        terminations=dict(ends.most_common()),
        problems=dict(problems.most_common()),
        num_unjudged=sum(reward.error is not None for _, reward in played),
    )
