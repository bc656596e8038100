"""Simulated users whose messages are awaited before tau2 asks for them.

    llm    a model behind an OpenAI-compatible URL, told what tau2's own user is told
    rule   says what it wants, then agrees a few times, then leaves; needs no model
    gold   carries out its part of the reference solution, for tests and upper bounds

A solo domain has tau2's `DummyUser`, which says nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from recipes.chat import ChatClient, ContextFullError, ServerError
from recipes.replies import Call, Message, ReplyError, parse_reply
from recipes.tau2.api import (
    STOP,
    AssistantMessage,
    BaseUser,
    MultiToolMessage,
    Task,
    UserMessage,
    UserSimulator,
    UserState,
    registry,
)
from recipes.tau2.domains import tool_schemas
from recipes.tau2.play.agents import (
    Incoming,
    PreparedMessage,
    openai_messages,
    tau2_calls,
)
from recipes.tau2.play.policies import GoldScript

# A user model that gives this many useless replies in a row counts as broken.
_MAX_USELESS_REPLIES = 3


class User(PreparedMessage, BaseUser):  # type: ignore[misc]
    """Base of the users below, as the episode loop needs it."""

    async def prepare(self, incoming: Any) -> None:
        """Prepare the answer to `incoming`.

        Raises:
            ServerError: it cannot be reached, or says nothing of use.
        """
        raise NotImplementedError

    def get_init_state(self, message_history: list[Any] | None = None) -> UserState:
        return UserState(system_messages=[], messages=[])

    @classmethod
    def is_stop(cls, message: UserMessage) -> bool:
        return bool(UserSimulator.is_stop(message))


class RuleUser(User):
    """States its whole case, agrees to whatever comes, and leaves."""

    def __init__(self, task: Task, max_replies: int) -> None:
        """
        Args:
            max_replies: messages before the one that ends the episode.
        """
        super().__init__()
        self._lines = _case(task)
        self._max_replies = max_replies
        self._num_replies = 0

    async def prepare(self, incoming: Incoming) -> None:
        if self._num_replies == self._max_replies:
            text = STOP
        elif self._num_replies < len(self._lines):
            text = self._lines[self._num_replies]
        else:
            text = "Yes, please go ahead."
        self._num_replies += 1
        self._pending = UserMessage(role="user", content=text)


def _case(task: Task) -> list[str]:
    """Return what a user has to say, from the scenario written for a simulator."""
    instructions = task.user_scenario.instructions
    if isinstance(instructions, str):
        return [instructions]
    parts = (instructions.reason_for_call, instructions.known_info)
    return [part for part in parts if part] or [instructions.task_instructions]


class GoldUser(User):
    """Carries out its actions of the reference solution, and leaves at its end."""

    def __init__(self, script: GoldScript) -> None:
        super().__init__()
        self._script = script
        self._call_ids = map("user_call_{}".format, itertools.count(1))
        self._greeted = False

    async def prepare(self, incoming: Incoming) -> None:
        self._pending = self._next()

    def _next(self) -> UserMessage:
        if not self._greeted:
            self._greeted = True
            return UserMessage(role="user", content="Please help me.")
        if (action := self._script.next_user_action()) is not None:
            calls = [Call(action.name, action.arguments)]
            return UserMessage(
                role="user", tool_calls=tau2_calls(calls, "user", self._call_ids)
            )
        return UserMessage(
            role="user", content=STOP if self._script.is_done else "Done."
        )


class LLMUser(User):
    """tau2's user simulator, asked through an awaited request."""

    def __init__(
        self, client: ChatClient, task: Task, tools: Sequence[dict[str, Any]]
    ) -> None:
        """
        Args:
            tools: the user's own, as OpenAI function schemas.
        """
        super().__init__()
        self._client = client
        simulator = UserSimulator(  # its guidelines depend on whether it has tools
            tools=[] if tools else None,
            instructions=str(task.user_scenario),
            llm="unused",
        )
        self._system: Message = {"role": "system", "content": simulator.system_prompt}
        self._schemas = tuple(tools)

    def get_init_state(self, message_history: list[Any] | None = None) -> UserState:
        self._state = UserState(
            system_messages=[], messages=list(message_history or [])
        )
        return self._state

    async def prepare(self, incoming: Incoming | AssistantMessage) -> None:
        parts = (
            incoming.tool_messages
            if isinstance(incoming, MultiToolMessage)
            else [incoming]
        )
        self._state.messages.extend(parts)
        problem = ""
        for _ in range(_MAX_USELESS_REPLIES):
            messages = [self._system]
            for message in self._state.flip_roles():
                messages += openai_messages(message)
            try:
                reply = parse_reply(
                    await self._client.complete(messages, self._schemas)
                )
            except ReplyError as error:
                problem = str(error)
            except ContextFullError as error:
                raise ServerError(
                    f"the conversation no longer fits the user model: {error!s:.200}"
                ) from error
            else:
                ids = map("user_call_{}".format, itertools.count())
                calls = tau2_calls(reply.calls, "user", ids)
                self._pending = UserMessage(
                    role="user", content=reply.text or None, tool_calls=calls
                )
                self._state.messages.append(self._pending)
                return
        raise ServerError(
            f"the user model gave {_MAX_USELESS_REPLIES} useless replies in a row "
            f"({problem:.200}); use a better one (tau2.user.model)"
        )


@functools.cache
def user_tools(tau2_name: str) -> tuple[dict[str, Any], ...]:
    """Return the user's own tools, if any, as OpenAI function schemas."""
    environment = registry.get_env_constructor(tau2_name)()
    has_tools = environment.user_tools is not None
    return tool_schemas(environment.get_user_tools() if has_tools else ())
