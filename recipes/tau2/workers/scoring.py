"""The official evaluator, with the gold half of its work done once per task.

tau2 compares the final database with one on which the reference solution was carried
out. It builds and hashes that one at each evaluation, which takes most of the 0.3 to
0.7 seconds that an airline episode costs. Here its hashes are kept. tau2's code is not
touched: for each task a domain is registered under a name of its own, whose second
environment is a stand-in that knows the hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes.tau2.api import (
    AssistantMessage,
    Environment,
    EvaluationType,
    SimulationRun,
    ToolMessage,
    UserMessage,
    evaluate_simulation,
    registry,
)
from recipes.tau2.domains import find_domain, find_task

_MESSAGE_TYPES = {
    "assistant": AssistantMessage,
    "user": UserMessage,
    "tool": ToolMessage,
}


def score(
    domain: str, task_id: str, termination: str, messages: Sequence[dict[str, Any]]
) -> float:
    """Return the reward of an episode, by tau2's evaluator. No model is asked.

    Args:
        messages: tau2's, as plain objects.

    Raises:
        Exception: whatever the evaluator raises on an episode that it cannot judge.
    """
    found, task = find_domain(domain), find_task(domain, task_id)
    simulation = SimulationRun(
        id="",
        task_id=task_id,
        start_time="",
        end_time="",
        duration=0.0,
        termination_reason=termination,
        messages=[_MESSAGE_TYPES[m["role"]](**m) for m in messages],
    )
    info = evaluate_simulation(
        simulation,
        task,
        EvaluationType.ALL,
        found.solo,
        _registered_name(found.tau2_name, task_id),
    )
    return float(info.reward)


def _registered_name(tau2_name: str, task_id: str) -> str:
    name = f"{tau2_name} with the gold hashes of {task_id}"
    if name not in registry.get_domains():
        registry.register_domain(_Environments(tau2_name), name)
    return name


class _Environments:
    """tau2's environment constructor, for the evaluation of one task.

    The evaluator passes `solo_mode` for the environment of the episode and nothing for
    the gold one (evaluator_env.py, tau2 26.3; a test compares rewards with tau2's own).
    """

    def __init__(self, tau2_name: str) -> None:
        self._construct = registry.get_env_constructor(tau2_name)
        self._gold = _GoldEnvironment(self._construct)

    def __call__(self, solo_mode: bool | None = None) -> Any:
        if solo_mode is None:
            return self._gold
        return self._construct(solo_mode=solo_mode)


class _GoldEnvironment:
    """Carries out the reference solution the first time, and remembers the hashes."""

    def __init__(self, construct: Any) -> None:
        self._construct = construct
        self._environment: Environment | None = None
        self._hashes: tuple[str | None, str | None] | None = None

    def set_state(self, **kwargs: Any) -> None:
        if self._hashes is None:
            self._environment = self._construct()
            self._environment.set_state(**kwargs)

    def make_tool_call(self, **kwargs: Any) -> Any:
        if self._environment is not None:
            return self._environment.make_tool_call(**kwargs)
        return None

    def get_db_hash(self) -> str | None:
        return self._get_hashes()[0]

    def get_user_db_hash(self) -> str | None:
        return self._get_hashes()[1]

    def _get_hashes(self) -> tuple[str | None, str | None]:
        if self._hashes is None:
            assert self._environment is not None, "set_state() comes first"
            self._hashes = (
                self._environment.get_db_hash(),
                self._environment.get_user_db_hash(),
            )
            self._environment = None
        return self._hashes
