"""An agent that solves a word problem in several turns with a calculator.

It is an agent workflow of AReaL: each turn is a model call through AReaL's OpenAI
proxy, so each becomes a training sequence that begins with the earlier ones. If a call
fails, the model is told "error" and may try again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_dta.embedded.calculator import CALCULATOR_TOOL, evaluate
from recipes.chat import ChatClient, ContextFullError, Message, proxy_client
from recipes.replies import Call, ReplyError, parse_reply

SYSTEM_PROMPT = "Use the calculator for each step."
_ERROR = "error"


class CalculatorAgent:
    """Solves problems; AReaL's `workflow` names it."""

    def __init__(
        self,
        reward_fn: str,
        gconfig: Any,
        tokenizer: Any = None,
        enable_thinking: bool = False,
        max_turns: int = 6,
        request_timeout_seconds: float = 600.0,
    ) -> None:
        """
        Args:
            reward_fn: import string of the reward of the last turn.
            gconfig: AReaL's generation settings.
            tokenizer: unused; AReaL's own workflows take one.
        """
        self._reward_fn = reward_fn
        self._max_turns = max_turns
        self._options = {
            "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
            "top_p": gconfig.top_p,
            "max_tokens": gconfig.max_new_tokens,
            "timeout_seconds": request_timeout_seconds,
            "enable_thinking": enable_thinking,
        }

    async def run(self, data: Mapping[str, Any], **proxy: Any) -> float:
        """Solve one problem.

        Args:
            data: `messages`, the user's turn, and `answer`.
            proxy: `base_url`, `api_key` and `http_client` of AReaL's proxy.

        Raises:
            ServerError: the proxy does not answer; AReaL drops the episode.
        """
        from areal.utils.dynamic_import import import_from_string

        client = proxy_client(proxy, **self._options)
        messages: list[Message] = [{"role": "system", "content": SYSTEM_PROMPT}]
        messages += data["messages"]
        final, num_turns = await solve(client, messages, self._max_turns)
        _record(num_turns, messages)
        reward = import_from_string(self._reward_fn)
        return float(reward(None, final, None, None, answer=data["answer"]))


async def solve(
    client: ChatClient, messages: list[Message], max_turns: int
) -> tuple[str, int]:
    """Alternate between model and calculator until the model makes no more calls.

    Args:
        messages: the conversation; the new messages are appended to it.

    Returns:
        The last turn's text, empty if that was a call, and the number of turns.
    """
    for turn in range(1, max_turns + 1):
        try:
            message = await client.complete(messages, [CALCULATOR_TOOL], "none")
        except ContextFullError:
            return "", turn - 1
        messages.append(message)
        try:
            reply = parse_reply(message)
        except ReplyError:
            # Every call of the message needs an answer, also those that are in order.
            served = message.get("tool_calls") or [{}]
            results = [(str(call.get("id") or ""), _ERROR) for call in served]
        else:
            if not reply.calls:
                return reply.text, turn
            results = [(call.id, _result(call)) for call in reply.calls]
        messages += [
            {"role": "tool", "tool_call_id": call_id or f"call_{i}", "content": result}
            for i, (call_id, result) in enumerate(results)
        ]
    return "", max_turns


def _result(call: Call) -> str:
    if call.name != "calculator":
        return _ERROR
    try:
        return str(evaluate(str(call.arguments.get("expression", ""))))
    except ValueError:
        return _ERROR


def _record(num_turns: int, messages: list[Message]) -> None:
    from areal.infra import workflow_context
    from areal.utils import stats_tracker

    results = [m["content"] for m in messages if m["role"] == "tool"]
    stats_tracker.get(workflow_context.stat_scope()).scalar(
        **{
            "calculator/turns": float(num_turns),
            "calculator/results": float(len(results)),
            "calculator/errors": float(results.count(_ERROR)),
        }
    )
