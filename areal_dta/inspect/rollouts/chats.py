"""Conversations to token sequences: OpenAI-style logs, answers to questions, and the
texts that AReaL dumps.

A conversation becomes what training on it would see: by default one sequence per model
call, which is the rendered prompt with the reply behind it. Prompt and reply are
encoded apart, as in generation, and the loss is on the reply.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from areal_dta.inspect.corpus import InputError, Record
from areal_dta.inspect.rollouts.arrays import identities
from areal_dta.inspect.rollouts.text import TextTokenizer

EXPORTS: Final = ("individual", "last", "concat")
"""``individual``: one sequence per reply; ``last``: for the last reply only;
``concat``: the whole conversation, with loss on all replies."""

_QUESTION_KEYS: Final = ("question", "problem", "prompt", "instruction")
_ANSWER_KEYS: Final = ("solutions", "answers", "responses", "completions")
_ROLES: Final = {"human": "user", "gpt": "assistant", "bot": "assistant"}
_EMPTY_THOUGHTS: Final = re.compile(r"\A<think>\s*</think>\s*")
_MAX_OPENING = 64  # characters of what opens a reply, at most

Message = dict[str, Any]


def is_chat(row: Mapping[str, Any]) -> bool:
    body = row.get("request", row)
    return isinstance(body, Mapping) and any(
        isinstance(body.get(k), list) for k in ("messages", "conversations")
    )


def is_answers(row: Mapping[str, Any]) -> bool:
    return any(isinstance(row.get(k), str) for k in _QUESTION_KEYS) and any(
        isinstance(row.get(k), list) for k in _ANSWER_KEYS
    )


def is_areal_dump(row: Mapping[str, Any]) -> bool:
    texts = isinstance(row.get("prompt"), str) and isinstance(
        row.get("completion"), str
    )
    return texts and "seqlen" in row


def chat_records(
    where: str, row: Mapping[str, Any], tokenizer: TextTokenizer, export: str
) -> Iterator[Record]:
    """Yield the sequences of an OpenAI-style log line.

    The line holds ``messages`` and perhaps ``tools``, or a ``request`` that does, and
    perhaps the reply to it (``response`` or ``choices``), which is then the only call.

    Raises:
        InputError: it does not; or the chat template refuses it.
    """
    body = row.get("request", row)
    raw = body.get("messages", body.get("conversations"))
    messages = [_message(where, i, m) for i, m in enumerate(raw)]
    reply = _reply(row)
    if reply is not None:
        messages.append(_message(where, len(messages), reply))
        export = "last" if export == "individual" else export
    calls = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not calls:
        raise InputError(
            f"{where}: no message of role assistant among {len(messages)}; expected at "
            "least one reply: nothing would be trained"
        )
    episode, group = identities(row)
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise InputError(
            f"{where}: tools is {type(tools).__name__}; expected a list of schemas"
        )
    yield from conversation_records(
        where, messages, calls, tools, tokenizer, export, episode or where, group
    )


def conversation_records(
    where: str,
    messages: Sequence[Message],
    calls: Sequence[int],
    tools: Sequence[Any] | None,
    tokenizer: TextTokenizer,
    export: str,
    episode: str,
    group: str,
) -> Iterator[Record]:
    """Yield the sequences of a conversation.

    Args:
        calls: indices of the messages that the model wrote.
    """
    try:
        if export == "last":
            calls = calls[-1:]
        parts: list[np.ndarray] = []
        spans: list[tuple[int, int]] = []
        history = ""
        for number, index in enumerate(calls):
            prompt, reply = _call(messages, index, tools, tokenizer)
            if export == "concat" and prompt.startswith(history):
                parts.append(tokenizer.encode(prompt[len(history) :]))
            else:  # also where the template has rewritten what came before
                parts, spans = [tokenizer.encode(prompt)], []
            start = sum(map(len, parts))
            parts.append(tokenizer.encode(reply))
            spans.append((start, start + len(parts[-1])))
            history = prompt + reply
            if export != "concat" or index == calls[-1]:
                yield Record(
                    np.concatenate(parts), where, tuple(spans), episode, group, number
                )
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where}: {error}") from error


def _call(
    messages: Sequence[Message],
    index: int,
    tools: Sequence[Any] | None,
    tokenizer: TextTokenizer,
) -> tuple[str, str]:
    """Return the text of the prompt of a call, and of the reply."""
    prompt = tokenizer.render(messages[:index], tools, generate=True)
    shown = tokenizer.render(messages[: index + 1], tools)
    start = len(os.path.commonprefix([prompt, shown]))
    message, end = messages[index], tokenizer.end_token
    content = str(message.get("content") or "")
    if start < len(prompt) - _MAX_OPENING:  # the template has rewritten the prompt
        return prompt, content + end
    reply = shown[start:]
    has_thoughts = "</think>" in content or bool(message.get("reasoning_content"))
    if not has_thoughts:  # shown by the template although nothing was thought
        reply = _EMPTY_THOUGHTS.sub("", reply)
    if end and end in reply:
        reply = reply[: reply.rindex(end) + len(end)]
    return prompt, reply


def answer_records(
    where: str, row: Mapping[str, Any], tokenizer: TextTokenizer
) -> Iterator[Record]:
    """Yield one sequence per answer to a question, each as a chat of two messages.

    Raises:
        InputError: an answer has no text.
    """
    question = next(row[k] for k in _QUESTION_KEYS if isinstance(row.get(k), str))
    answers = next(row[k] for k in _ANSWER_KEYS if isinstance(row.get(k), list))
    for i, answer in enumerate(answers):
        text = answer
        if isinstance(answer, Mapping):
            text = next((answer[k] for k in ("text", "content") if k in answer), None)
        if not isinstance(text, str):
            raise InputError(
                f"{where}: answer {i} is {str(answer)!r:.60}; expected a text, or an "
                "object with text or content"
            )
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": text},
        ]
        yield from conversation_records(
            where, messages, [1], None, tokenizer, "last", f"{where}, {i}", where
        )


def dumped_records(
    where: str, row: Mapping[str, Any], tokenizer: TextTokenizer, note: Any
) -> Iterator[Record]:
    """Yield the sequence of a line that AReaL's ``rollout.dump_to_file`` wrote.

    Args:
        note: called with True where encoding the text again gives as many tokens as
            were dumped, with False where it does not.
    """
    prompt = tokenizer.encode(row["prompt"])
    reply = tokenizer.encode(row["completion"])
    tokens = np.concatenate([prompt, reply])
    note(row["seqlen"] == len(tokens))
    if not len(tokens):
        raise InputError(f"{where}: prompt and completion are empty")
    task = str(row.get("task_id", ""))
    spans = ((len(prompt), len(tokens)),)
    yield Record(tokens, where, spans, "", task, int(row.get("sample_idx") or 0))


def _reply(row: Mapping[str, Any]) -> Any:
    """Return the message with which a logged request was answered, if any."""
    response = row.get("response", row)
    if isinstance(response, str):
        return {"role": "assistant", "content": response}
    if not isinstance(response, Mapping):
        return None
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        return choices[0].get("message")
    if "role" in response and "content" in response:
        return response
    message = response.get("message")
    return message if isinstance(message, Mapping) else None


def _message(where: str, index: int, message: Any) -> Message:
    """Check a message, and bring it into the form that chat templates take."""
    if not isinstance(message, Mapping):
        raise InputError(
            f"{where}: message {index} is {type(message).__name__}; expected an object "
            "with role and content"
        )
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if isinstance(content, list):  # parts
        content = "".join(
            str(part.get("text", "")) if isinstance(part, Mapping) else str(part)
            for part in content
        )
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise InputError(
            f"{where}: message {index} has role {role!r:.40} and content "
            f"{type(content).__name__}; expected a role and a text"
        )
    result: Message = {k: v for k, v in message.items() if v is not None}
    result.update(role=_ROLES.get(role, role), content=content or "")
    if role == "developer":
        result["role"] = "system"
    for key in ("from", "value"):
        result.pop(key, None)
    calls = result.get("tool_calls")
    if isinstance(calls, list):
        result["tool_calls"] = [_tool_call(where, index, call) for call in calls]
    return result


def _tool_call(where: str, index: int, call: Any) -> Any:
    """Return a tool call with its arguments as an object, as templates expect."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise InputError(
            f"{where}: message {index} has the tool call {str(call)!r:.60}; expected a "
            "function with name and arguments"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # what the model wrote, as it is
    return {
        **{k: v for k, v in call.items() if k in ("id", "type")},
        "function": {"name": function["name"], "arguments": arguments},
    }
