"""tau2 agents whose messages are awaited before tau2 asks for them.

tau2 is synchronous: its orchestrator calls `generate_next_message` and waits. Here
`prepare` awaits the policy and keeps the message, and `generate_next_message` returns
it, so hundreds of episodes share an event loop and tau2 stays as it is.

The agent keeps the OpenAI messages that it received and wrote as they were. Messages
rebuilt from tau2's would render differently, and split the prefix that calls share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from recipes.replies import (
    Call,
    Message,
    Problem,
    Reply,
    ReplyError,
    assistant_message,
    parse_reply,
)
from recipes.tau2.api import (
    AssistantMessage,
    LLMAgent,
    LLMSoloAgent,
    MultiToolMessage,
    Task,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from recipes.tau2.domains import STOP_TEXT, STOP_TOOL, AgentContext
from recipes.tau2.play.policies import Policy

# tau2's calculators evaluate powers as well: 9**9**9 would take minutes and all memory.
_MAX_EXPRESSION_CHARACTERS = 200

Incoming: TypeAlias = UserMessage | ToolMessage | MultiToolMessage | None


class PreparedMessage:
    """Mixin; list it before tau2's class so that its hooks win."""

    _pending: Any = None

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        """tau2's hook: return the message that was prepared."""
        pending, self._pending = self._pending, None
        assert pending is not None, "prepare() was not awaited"
        return pending, state

    def set_seed(self, seed: int) -> None:
        """tau2's hook; the sampling, if any, is the server's."""


class _PreparedTurns(PreparedMessage):
    """Mixin with what both kinds of agent share."""

    def start(self, context: AgentContext, policy: Policy) -> None:
        self._context = context
        self._policy = policy
        self._call_ids = map("call_{}".format, itertools.count())
        self.num_turns = 0
        self.history: list[Message] = [
            {"role": "system", "content": context.system_prompt}
        ]

    async def prepare(self, incoming: Incoming) -> None:
        """Let the policy answer `incoming`, which is None if the agent opens.

        Raises:
            ReplyError: the answer cannot be acted on.
            ServerError: there is none.
        """
        self.history += openai_messages(incoming)
        message = await self._policy.reply(self.history, self._context.tools)
        self.num_turns += 1
        self.history.append(message)
        reply = parse_reply(message)
        for call in reply.calls:
            _check_safe(call)
        self._pending = self._to_tau2(reply)

    def get_init_state(self, message_history: list[Any] | None = None) -> None:
        """tau2's hook: the messages from before the agent's first turn."""
        for message in message_history or []:
            self.history += openai_messages(message)

    def _to_tau2(self, reply: Reply) -> AssistantMessage:
        calls = tau2_calls(reply.calls, "assistant", self._call_ids)
        return AssistantMessage(
            role="assistant", content=reply.text or None, tool_calls=calls
        )


class DialogueAgent(_PreparedTurns, LLMAgent):  # type: ignore[misc]
    """Talks to a user."""


class SoloAgent(_PreparedTurns, LLMSoloAgent):  # type: ignore[misc]
    """Works on a ticket alone; stops by a tool call, which tau2 records as a text."""

    def _to_tau2(self, reply: Reply) -> AssistantMessage:
        if any(call.name == STOP_TOOL for call in reply.calls):
            return AssistantMessage(role="assistant", content=STOP_TEXT)
        return super()._to_tau2(reply)


def make_agent(
    task: Task, solo: bool, context: AgentContext, policy: Policy
) -> DialogueAgent | SoloAgent:
    """Build the agent of one episode.

    tau2's classes get neither tools nor policy: the context has both, as the model
    sees them.
    """
    agent: DialogueAgent | SoloAgent
    if solo:
        agent = SoloAgent([], "", task)
    else:
        agent = DialogueAgent([], "")
    agent.start(context, policy)
    return agent


def _check_safe(call: Call) -> None:
    """Refuse a call that neither tau2 nor, later, its evaluator can carry out.

    Raises:
        ReplyError: the calculator is asked for a power or a long expression.
    """
    if call.name != "calculate":
        return
    expression = str(call.arguments.get("expression", ""))
    if "**" in expression or len(expression) > _MAX_EXPRESSION_CHARACTERS:
        raise ReplyError(
            Problem.UNSAFE_CALL,
            f"calculate({expression!r:.80}); powers and more than "
            f"{_MAX_EXPRESSION_CHARACTERS} characters are not evaluated",
        )


def tau2_calls(
    calls: Iterable[Call], requestor: str, ids: Iterator[str]
) -> list[ToolCall] | None:
    """Convert calls to tau2's; None if there are none.

    Args:
        ids: for calls that have none of their own.
    """
    return [
        ToolCall(
            id=call.id or next(ids),
            name=call.name,
            arguments=call.arguments,
            requestor=requestor,
        )
        for call in calls
    ] or None


def openai_messages(message: Any) -> list[Message]:
    """Convert a tau2 message to what a model sees; several for several tool results."""
    if message is None:
        return []
    if isinstance(message, MultiToolMessage):
        return [m for part in message.tool_messages for m in openai_messages(part)]
    content = message.content or ""
    if isinstance(message, ToolMessage):
        return [{"role": "tool", "tool_call_id": message.id, "content": content}]
    if isinstance(message, UserMessage):
        return [{"role": "user", "content": content}]
    calls = [Call(c.name, c.arguments, c.id) for c in message.tool_calls or ()]
    return [assistant_message(content, calls)]
