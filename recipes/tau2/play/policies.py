"""Who writes the agent's messages: a model behind a URL, or a built-in script.

The scripts bound what a model can reach: `GoldPolicy` does what the task's authors
wrote down, `RefusePolicy` does nothing at all. Some tasks reward that too, so its score
is the floor that an agent has to beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from recipes.chat import ChatClient, ContextFullError
from recipes.replies import Call, Message, Problem, ReplyError, assistant_message
from recipes.tau2.api import Action, Task
from recipes.tau2.domains import STOP_TOOL

REFUSAL = "I am sorry, I cannot help you with that."


class Policy(Protocol):
    """Writes an agent's next message."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Message:
        """Return an OpenAI assistant message.

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
            tool_choice: "none" makes AReaL's proxy return the text that the model
                wrote, with its tool calls unparsed. So the history holds exactly that
                text, and later prompts hold exactly its tokens.
        """
        self._client = client
        self._tool_choice = tool_choice

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Message:
        try:
            return await self._client.complete(messages, tools, self._tool_choice)
        except ContextFullError as error:
            raise ReplyError(Problem.CONTEXT_FULL, f"{error!s:.200}") from error


class GoldScript:
    """A cursor in a task's reference solution, shared by the agent and the user."""

    def __init__(self, task: Task) -> None:
        criteria = task.evaluation_criteria
        self._actions: list[Action] = list(criteria.actions or []) if criteria else []
        self._facts: list[str] = (
            list(criteria.communicate_info or []) if criteria else []
        )
        self._next = 0

    @property
    def is_done(self) -> bool:
        return self._next == len(self._actions)

    @property
    def next_is_users(self) -> bool:
        return not self.is_done and self._actions[self._next].requestor == "user"

    def next_agent_action(self, solo: bool) -> Action | None:
        """Return the next action if it is the agent's; a solo agent performs all."""
        if self.is_done or (self.next_is_users and not solo):
            return None
        return self._take()

    def next_user_action(self) -> Action | None:
        """Return the next action if it is the user's."""
        return self._take() if self.next_is_users else None

    def closing_words(self) -> str:
        """Everything that the agent is expected to tell the user."""
        return "; ".join(["That is done", *self._facts]) + "."

    def _take(self) -> Action:
        action = self._actions[self._next]
        self._next += 1
        return action


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
    """Declines politely; in a solo domain it ends the episode at once."""

    def __init__(self, solo: bool) -> None:
        self._solo = solo

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Message:
        if self._solo:
            return assistant_message(None, [Call(STOP_TOOL, {})])
        return assistant_message(REFUSAL)
