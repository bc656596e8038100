"""Parse the words and tool calls of a model's reply, an OpenAI message.

No inference server needs a parser of its own: thoughts and blocks such as
``<tool_call>{"name": ..., "arguments": ...}</tool_call>`` are taken out of the text
here, and calls that a server did parse are accepted as they are. So an agent sees the
same, whatever serves its model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""An OpenAI chat message."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# The end mark may be missing: servers stop at it, and models forget it between calls.
_BLOCK = re.compile(f"{_OPEN}(.*?)(?:{_CLOSE}|(?={_OPEN})|\\Z)", re.DOTALL)
_FENCE = re.compile(r"\A\s*```\w*\s*(.*?)\s*```\s*\Z", re.DOTALL)
_EMPTY_FENCE = re.compile(r"```\w*\s*```")
# Chat control tokens that some servers leave in the text.
_CONTROL = re.compile(r"<\|(?:im_start|im_end|endoftext)\|>")
_THINKING = re.compile(
    r"\A\s*(?:<think>)?.*?</think>\s*(?:<think>.*?</think>\s*)*", re.DOTALL
)


class Problem(StrEnum):
    """Reasons why a reply cannot be acted on. Each ends the episode and is counted."""

    EMPTY = "empty_message"
    BROKEN_CALL = "broken_tool_call"
    UNSAFE_CALL = "unsafe_tool_call"
    CONTEXT_FULL = "context_full"


class ReplyError(ValueError):
    """The reply cannot be acted on; `problem` says why."""

    def __init__(self, problem: Problem, detail: str) -> None:
        super().__init__(f"{problem}: {detail}")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call, as the model meant it."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """The server's id; a call in the text has none."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that can be acted on: it has a text, or calls, or both."""

    text: str
    calls: tuple[Call, ...] = ()


def strip_thinking(content: str) -> str:
    """Drop the thoughts that a reply opens with."""
    return _THINKING.sub("", content, count=1)


def parse_reply(message: Mapping[str, Any]) -> Reply:
    """Read an OpenAI assistant message.

    Raises:
        ReplyError: nothing in it, or a call that is not JSON of the right form.
    """
    text = _visible_text(message.get("content") or "")
    calls = [_served_call(call) for call in message.get("tool_calls") or ()]
    calls += [_text_call(block) for block in _BLOCK.findall(text)]
    text = _BLOCK.sub("", text)
    if calls:
        text = _EMPTY_FENCE.sub("", text)
    if _OPEN in text or _CLOSE in text:
        raise ReplyError(Problem.BROKEN_CALL, f"unbalanced {_OPEN} in {text!r:.200}")
    text = text.strip()
    if not text and not calls:
        raise ReplyError(Problem.EMPTY, "neither a text nor a tool call")
    return Reply(text, tuple(calls))


def _visible_text(content: str) -> str:
    text = strip_thinking(_CONTROL.sub("", content))
    # Thoughts that were cut off have no end mark: all that follows is thought.
    return text.partition("<think>")[0]


def _served_call(call: Mapping[str, Any]) -> Call:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise ReplyError(Problem.BROKEN_CALL, f"no function in {call!r:.200}")
    call_id = str(call.get("id") or "")
    return _call(function, call_id)


def _text_call(block: str) -> Call:
    fenced = _FENCE.match(block)
    value = _object(fenced[1] if fenced else block, f"{block!r:.200}")
    function = value.get("function")  # OpenAI's form, written as text
    return _call(function if isinstance(function, Mapping) else value)


def _call(function: Mapping[str, Any], call_id: str = "") -> Call:
    name = function.get("name")
    # Llama's models write "parameters".
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ReplyError(Problem.BROKEN_CALL, f"the call's name is {name!r:.80}")
    if arguments is None or arguments in ("", "null"):  # a call without any
        arguments = {}
    arguments = _object(arguments, f"arguments {arguments!r:.200}")
    return Call(name, arguments, call_id)


def _object(value: Any, shown: str) -> dict[str, Any]:
    """Return `value`, parsed if it is JSON text, as an object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ReplyError(
                Problem.BROKEN_CALL, f"{shown} is not JSON ({error})"
            ) from error
    if not isinstance(value, dict):
        raise ReplyError(Problem.BROKEN_CALL, f"{shown} is not a JSON object")
    return value


def assistant_message(text: str | None, calls: Sequence[Call] = ()) -> Message:
    """Build an OpenAI assistant message; the inverse of `parse_reply`."""
    message: Message = {"role": "assistant", "content": text or ""}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments),
                },
            }
            for index, call in enumerate(calls)
        ]
    return message
