"""The agent that AReaL's rollout workers run: one tau2 episode, one reward.

AReaL starts an OpenAI proxy next to each rollout worker (`rollout.agent.mode: inline`),
which records the tokens and logprobs of every model call of the episode. `Tau2Workflow`
plays the episode through that proxy and returns its reward. AReaL exports the recorded
calls as training sequences (`rollout.agent.export_style`) and propagates the reward to
earlier calls (`rollout.agent.turn_discount`).
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from recipes.chat import proxy_client
from recipes.replies import Problem
from recipes.tau2.domains import find_domain
from recipes.tau2.options import Tau2Options, UserOptions
from recipes.tau2.play.episode import Episode, run_episode, user_client, user_maker
from recipes.tau2.play.policies import ChatPolicy
from recipes.tau2.workers.environments import EnvironmentPool
from recipes.tau2.workers.rewards import Reward, RewardPool

_TERMINATIONS = (
    "user_stop",
    "agent_stop",
    "max_steps",
    "too_many_errors",
    "agent_error",
)


class Tau2Workflow:
    """Plays episodes; AReaL's `workflow` names it."""

    def __init__(
        self,
        options: Mapping[str, Any],
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_new_tokens: int = 512,
        enable_thinking: bool = False,
    ) -> None:
        """
        Args:
            options: the fields of `Tau2Options`.
            enable_thinking: passed to the model's chat template.

        Raises:
            ValueError: an option is wrong.
        """
        self.options = Tau2Options(
            **{**options, "user": UserOptions(**options.get("user", {}))}
        )
        self.options.validate()
        self._chat: dict[str, Any] = {
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_new_tokens,
            "timeout_seconds": self.options.request_timeout_seconds,
            "enable_thinking": enable_thinking,
        }

    async def run(self, data: Mapping[str, Any], **proxy: Any) -> float:
        """Play the episode of one row of the dataset.

        Args:
            data: `domain` and `task_id`.
            proxy: `base_url`, `api_key` and `http_client` of AReaL's proxy.

        Raises:
            ServerError, TimeoutError: there is no result; AReaL drops the episode.
        """
        options = self.options
        domain = find_domain(data["domain"])
        policy = ChatPolicy(proxy_client(proxy, **self._chat), tool_choice="none")
        users = user_client(domain, options.user, proxy["http_client"])
        episode = await run_episode(
            domain,
            data["task_id"],
            policy,
            user_maker(domain, options.user, users),
            options,
            _environments(options.environment_processes),
        )
        pool = _rewards(options.reward_processes, options.reward_timeout_seconds)
        reward = await pool.score(episode.scoring_request())
        _record(episode, reward)
        return reward.value


# AReaL makes a workflow per prompt: all of a process share these pools.


@functools.cache
def _rewards(num_processes: int, timeout_seconds: float) -> RewardPool:
    pool = RewardPool(num_processes, timeout_seconds)
    atexit.register(pool.close)
    return pool


@functools.cache
def _environments(num_processes: int) -> EnvironmentPool:
    pool = EnvironmentPool(num_processes)
    atexit.register(pool.close)
    return pool


def episode_statistics(episode: Episode, reward: Reward) -> dict[str, float]:
    """Return what is logged per episode; the same keys always, so means are shares."""
    return {
        "tau2/turns": float(episode.num_turns),
        "tau2/tool_errors": float(episode.num_tool_errors),
        "tau2/reward_error": float(reward.error is not None),
        **{
            f"tau2/end/{name}": float(episode.termination == name)
            for name in _TERMINATIONS
        },
        **{
            f"tau2/problem/{problem}": float(episode.problem == problem)
            for problem in Problem
        },
    }


def _record(episode: Episode, reward: Reward) -> None:
    from areal.infra import workflow_context
    from areal.utils import logging, stats_tracker

    scope = workflow_context.stat_scope()
    stats_tracker.get(scope).scalar(**episode_statistics(episode, reward))
    if reward.error is not None:
        logging.getLogger("tau2").warning(
            "no verdict on %s task %s, reward 0: %s",
            episode.domain,
            episode.task_id,
            reward.error,
        )


def workflow_kwargs(
    options: Tau2Options, gconfig: Any, enable_thinking: bool
) -> dict[str, Any]:
    """Return the arguments of `Tau2Workflow` as plain values, to send to workers."""
    return {
        "options": asdict(options),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "max_new_tokens": gconfig.max_new_tokens,
        "enable_thinking": enable_thinking,
    }
