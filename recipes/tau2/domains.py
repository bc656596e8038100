"""The domains: their tasks and splits, and what an agent is told (prompt and tools).

tau2 is an optional dependency, imported when it is first needed. The prompts are those
of tau2's own agents, so that an agent of ours sees the same text.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tau2.data_model.tasks import Task

# A solo agent stops by calling this tool. tau2 records the text in place of the call.
STOP_TOOL = "done"
STOP_TEXT = "###STOP###"

INSTALL_HINT = 'pip install -e ".[tau2]"'


class MissingTau2Error(ImportError, ValueError):
    """tau2 is not installed."""


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain as recipes name it; in a solo domain the agent has no user."""

    name: str
    tau2_name: str
    solo: bool = False


DOMAINS = {
    domain.name: domain
    for domain in (
        Domain("airline", "airline"),
        Domain("retail", "retail"),
        Domain("telecom", "telecom"),
        Domain("telecom_solo", "telecom", solo=True),
        Domain("mock", "mock"),
    )
}

# Unless the agent succeeds, tau2's evaluator raises on these instead of failing them.
_NOT_EVALUABLE = {"mock": ("create_task_1_with_env_assertions",)}


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What the agent is given before its first turn."""

    system_prompt: str
    tools: tuple[dict[str, Any], ...]
    """OpenAI function schemas."""


def find_domain(name: str) -> Domain:
    """Look up a domain by its name.

    Raises:
        ValueError: there is none of that name.
    """
    try:
        return DOMAINS[name]
    except KeyError:
        raise ValueError(
            f"unknown tau2 domain {name!r}; expected one of {', '.join(DOMAINS)}"
        ) from None


def import_tau2() -> None:
    """Import tau2 for the first time, quietly and without the network.

    Takes about ten seconds, most of them litellm's.

    Raises:
        MissingTau2Error: it is not installed.
    """
    # Otherwise litellm fetches its price list from the network while it is imported.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        import loguru

        # tau2 logs each step, and a warning at import. This silences tau2 alone.
        loguru.logger.disable("tau2")
        import tau2.registry  # noqa: F401
    except ImportError as error:
        raise MissingTau2Error(
            f"tau2-bench is needed but not installed ({error}): {INSTALL_HINT}"
        ) from error


@functools.cache
def load_tasks(tau2_name: str) -> dict[str, Task]:
    """Load all tasks of a domain, by id. Cached: telecom's file has 14 MB."""
    import_tau2()
    from tau2.registry import registry

    return {task.id: task for task in registry.get_tasks_loader(tau2_name)(None)}


def task_ids(domain_name: str, split: str) -> tuple[str, ...]:
    """List the tasks of a split that can be played and evaluated, in tau2's order.

    The mock domain has one set of tasks, which serves as every split.

    Raises:
        MissingTau2Error: tau2 is not installed.
        ValueError: there is no such domain or split.
    """
    domain = find_domain(domain_name)
    tasks = load_tasks(domain.tau2_name)
    from tau2.agent.llm_agent import LLMSoloAgent
    from tau2.registry import registry

    splits = {split: list(tasks)}
    if domain.tau2_name != "mock":
        splits = registry.get_task_splits_loader(domain.tau2_name)()
    if split not in splits:
        raise ValueError(
            f"the {domain.name} domain has no split {split!r}; "
            f"expected one of {', '.join(splits)}"
        )
    return tuple(
        task_id
        for task_id in splits[split]
        if task_id not in _NOT_EVALUABLE.get(domain.tau2_name, ())
        and (not domain.solo or LLMSoloAgent.check_valid_task(tasks[task_id]))
    )


def find_task(domain_name: str, task_id: str) -> Task:
    """Look up a task.

    Raises:
        ValueError: there is none of that id.
    """
    domain = find_domain(domain_name)
    try:
        return load_tasks(domain.tau2_name)[task_id]
    except KeyError:
        raise ValueError(
            f"tau2 has no {domain.tau2_name} task {task_id!r}; "
            "were the trajectories recorded with another version of tau2?"
        ) from None


def agent_context(domain_name: str, task_id: str) -> AgentContext:
    """Return prompt and tools of tau2's LLMAgent, or LLMSoloAgent in a solo domain.

    Only a solo agent's prompt depends on the task: it holds the ticket.

    Raises:
        MissingTau2Error: tau2 is not installed.
        ValueError: there is no such domain or, for a solo domain, no such task.
    """
    domain = find_domain(domain_name)
    return _solo_context(domain_name, task_id) if domain.solo else _context(domain)


@functools.cache
def _context(domain: Domain) -> AgentContext:
    import_tau2()
    from tau2.agent.llm_agent import LLMAgent
    from tau2.registry import registry

    environment = registry.get_env_constructor(domain.tau2_name)()
    agent = LLMAgent(environment.get_tools(), environment.get_policy())
    return AgentContext(agent.system_prompt, tool_schemas(agent.tools))


@functools.cache
def _solo_context(domain_name: str, task_id: str) -> AgentContext:
    task = find_task(domain_name, task_id)
    from tau2.agent.llm_agent import LLMSoloAgent

    policy, tools = _solo_policy_and_tools(find_domain(domain_name))
    return AgentContext(LLMSoloAgent([], policy, task).system_prompt, tools)


@functools.cache
def _solo_policy_and_tools(domain: Domain) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Return what all tasks share. Cached: the schemas of 44 tools take a while."""
    from tau2.agent.llm_agent import LLMSoloAgent
    from tau2.registry import registry

    environment = registry.get_env_constructor(domain.tau2_name)(solo_mode=True)
    # The agent acts for the user too, and adds a tool of its own to say it is done.
    tools = environment.get_tools() + environment.get_user_tools()
    tasks = load_tasks(domain.tau2_name).values()
    any_task = next(filter(LLMSoloAgent.check_valid_task, tasks))
    agent = LLMSoloAgent(tools, environment.get_policy(), any_task)
    return agent.domain_policy, tool_schemas(agent.tools)


def tool_schemas(tools: Iterable[Any]) -> tuple[dict[str, Any], ...]:
    """Return the OpenAI function schemas of tau2's tools."""
    return tuple(tool.openai_schema for tool in tools)
