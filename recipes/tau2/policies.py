"""Who writes the agent's messages: a model behind a URL, or a built-in script.

The scripts bound what a model can reach: `GoldPolicy` does what the task's authors
wrote down, `RefusePolicy` does nothing at all. Some tasks reward that too, so its score
is the floor that an agent has to beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from recipes.chat import ChatClient, ContextFullError
from recipes.replies import Call, Problem, ReplyError, assistant_message
from recipes.tau2.gold import GoldScript
from recipes.tau2.messages import STOP_TOOL, Message

REFUSAL = "I am sorry, I cannot help you with that."


class Policy(Protocol):
    """Writes an agent's next message."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Message:
        """An OpenAI assistant message.

        Raises:
            ReplyError: there cannot be one.
            ServerError: whoever writes it cannot be reached.
        """
        ...


class ChatPolicy:
    """A model behind an OpenAI-compatible URL."""

    def __init__(self, client: ChatClient, tool_choice: str | None = None) -> None:
        """
        Args:
            tool_choice: "none" lets AReaL's proxy return the text that the model wrote,
                with its tool calls unparsed. So the history holds that very text, and
                later prompts its very tokens.
        """
        self._client = client
        self._tool_choice = tool_choice
        self.num_calls = 0

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Message:
        try:
            message = await self._client.complete(messages, tools, self._tool_choice)
        except ContextFullError as error:
            raise ReplyError(Problem.CONTEXT_FULL, f"{error!s:.200}") from error
        self.num_calls += 1
        return message


class GoldPolicy:
    """Follows the task's reference solution."""

    def __init__(self, script: GoldScript, solo: bool) -> None:
        self._script = script
        self._solo = solo

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Message:
        if (action := self._script.next_agent_action(self._solo)) is not None:
            return assistant_message(None, [Call(action.name, action.arguments)])
        if self._solo:
            return assistant_message(None, [Call(STOP_TOOL, {})])
        if self._script.next_is_users:
            return assistant_message("Please do the next step yourself.")
        return assistant_message(self._script.closing_words())


class RefusePolicy:
    """Does nothing, politely; in a solo domain it ends the episode at once."""

    def __init__(self, solo: bool) -> None:
        self._solo = solo

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Message:
        if self._solo:
            return assistant_message(None, [Call(STOP_TOOL, {})])
        return assistant_message(REFUSAL)
