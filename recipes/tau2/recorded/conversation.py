"""Converts recorded tau2 messages to the OpenAI messages of the agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipes.replies import Message, strip_thinking
from recipes.tau2.domains import STOP_TEXT, STOP_TOOL


@dataclass(frozen=True, slots=True)
class Conversation:
    """An episode as its agent saw it."""

    messages: tuple[Message, ...]
    """The system prompt first; tool arguments are objects, not JSON text."""
    calls: tuple[int, ...]
    """Indices of the messages that the agent's model wrote, in order."""
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI function schemas."""


def agent_conversation(
    system_prompt: str,
    tools: Sequence[dict[str, Any]],
    recorded: Sequence[Message],
    solo: bool = False,
) -> Conversation:
    """Extract the part of a recorded episode that its agent took part in.

    The user's own tool calls and their results are left out. The greeting that opens
    an episode with a user is kept, but it is not a call: the orchestrator wrote it.

    Raises:
        ValueError: a message has a role or a shape that tau2 does not record.
    """
    messages: list[Message] = [{"role": "system", "content": system_prompt}]
    calls = []
    for index, message in enumerate(recorded):
        role = message.get("role")
        by_user = message.get("requestor") == "user"
        if role == "assistant":
            if index > 0 or solo:
                calls.append(len(messages))
            messages.append(_assistant_message(message, solo))
        elif role == "user" and not message.get("tool_calls"):
            messages.append({"role": "user", "content": _text(message, index)})
        elif role == "tool" and not by_user:
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": message.get("id", ""),
                    "content": _text(message, index),
                }
            )
        elif role not in ("user", "tool"):
            raise ValueError(
                f"message {index} has role {role!r}; "
                "expected assistant, user or tool, as tau2 records them"
            )
    return Conversation(tuple(messages), tuple(calls), tuple(tools))


def _text(message: Message, index: int) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError(
            f"message {index} ({message['role']}) has content {content!r}; "
            "expected text, as tau2 records it"
        )
    return content


def _assistant_message(message: Message, solo: bool) -> Message:
    content = strip_thinking(message.get("content") or "")
    calls = list(message.get("tool_calls") or ())
    if solo and not calls and content == STOP_TEXT:
        content, calls = "", [{"name": STOP_TOOL, "arguments": {}}]
    result: Message = {"role": "assistant", "content": content}
    if calls:
        result["tool_calls"] = [
            {
                "id": call.get("id", ""),
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return result
