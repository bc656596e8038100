"""Agents' conversations with a planted reason for which their prompts share less.

`conversations` makes a batch without any; each function of PLANTED spoils one.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

POLICY = " ".join(
    f"Rule {i}: an agent that handles case {i} asks for the {word} before it acts."
    for i, word in enumerate("name date order ticket address refund seat bag".split())
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"{verb}_{thing}",
            "description": f"{verb.title()} a {thing} of the customer.",
            "parameters": {
                "type": "object",
                "properties": {f"{thing}_id": {"type": "string"}},
                "required": [f"{thing}_id"],
            },
        },
    }
    for verb in ("find", "cancel", "change")
    for thing in ("order", "ticket")
]
EXAMPLES = [
    f"Example {i}: the customer says that {word} is broken, and you replace {word}."
    for i, word in enumerate("lamp chair table phone radio clock".split())
]


def conversations(num: int = 4, turns: int = 3, thoughts: bool = False) -> list[Row]:
    """Return chats of one system prompt; each has questions of its own."""
    rows = []
    for i in range(num):
        messages: list[Row] = [{"role": "system", "content": POLICY}]
        for t in range(turns):
            messages.append(
                {"role": "user", "content": f"Customer {i} asks question {t}: why?"}
            )
            thought = f"<think>\nI ponder {i} and {t} for a while.\n</think>\n\n"
            messages.append(
                {
                    "role": "assistant",
                    "content": thought * thoughts
                    + f"Answer {t} for customer {i} is that it has to be so, always.",
                }
            )
        rows.append({"messages": messages, "tools": copy.deepcopy(TOOLS)})
    return rows


def in_system(text: Callable[[int], str]) -> Callable[[list[Row]], None]:
    """Return a function that puts a text in front of each system prompt."""

    def plant(rows: list[Row]) -> None:
        for i, row in enumerate(rows):
            row["messages"][0]["content"] = f"{text(i)}\n{POLICY}"

    return plant


def shuffle_tools(rows: list[Row]) -> None:
    for i, row in enumerate(rows):
        random.Random(i).shuffle(row["tools"])


def shuffle_examples(rows: list[Row]) -> None:
    for i, row in enumerate(rows):
        examples = random.Random(i).sample(EXAMPLES, len(EXAMPLES))
        row["messages"][0]["content"] = "\n".join([POLICY, *examples])


def shuffle_keys(rows: list[Row]) -> None:
    order = {"name": "Ann", "city": "Rome", "age": 44, "plan": "gold", "id": "X7"}
    for i, row in enumerate(rows):
        keys = random.Random(i).sample(list(order), len(order))
        text = json.dumps({k: order[k] for k in keys})
        row["messages"][0]["content"] = f"The account is {text}. {POLICY}"


def vary_whitespace(rows: list[Row]) -> None:
    for i, row in enumerate(rows):
        gap = "\n" * (1 + i)
        row["messages"][0]["content"] = f"You are an agent.{gap}{POLICY}"


def vary_persona(rows: list[Row]) -> None:
    for row, who in zip(rows, ("kind", "strict", "terse", "funny"), strict=True):
        row["messages"][0]["content"] = f"You are a {who} agent. {POLICY}"


def rewrite_replies(rows: list[Row]) -> None:
    """Log each call by itself; the history has other words in front of a reply."""
    calls = []
    for i, row in enumerate(rows):
        for n in range(2, len(row["messages"]), 2):
            history = copy.deepcopy(row["messages"][: n + 1])
            for message in history[2:-1:2]:
                message["content"] = f"Well. {message['content']}"
            calls.append(
                {
                    "messages": history[:-1],
                    "tools": row["tools"],
                    "response": history[-1],
                    "session_id": str(i),
                }
            )
    rows[:] = calls


def cut_history(rows: list[Row]) -> None:
    """Log each call by itself; prompts keep the last three messages only."""
    calls = []
    for i, row in enumerate(rows):
        for n in range(2, len(row["messages"]), 2):
            history = row["messages"][: n + 1]
            kept = history[1:-1][-3:]
            calls.append(
                {
                    "messages": [history[0], *kept],
                    "tools": row["tools"],
                    "response": history[-1],
                    "session_id": str(i),
                }
            )
    rows[:] = calls
