"""Users and limits of episodes, from the options."""

from __future__ import annotations

from typing import Any

from recipes.chat import ChatClient, ChatOptions
from recipes.tau2.api import Task
from recipes.tau2.domains import Domain
from recipes.tau2.episode import Limits, MakeUser
from recipes.tau2.options import Tau2Options, UserOptions
from recipes.tau2.users import LLMUser, RuleUser, User, user_tools

_USER_REMEDY = (
    "start that server, or set tau2.user.base_url, tau2.user.timeout_seconds "
    "and tau2.user.max_retries"
)


def limits(options: Tau2Options) -> Limits:
    return Limits(
        options.max_steps, options.max_errors, options.episode_timeout_seconds
    )


def user_client(options: UserOptions, http_client: Any = None) -> ChatClient:
    """The client of the user model."""
    chat = ChatOptions(
        base_url=options.base_url,
        model=options.model,
        api_key=options.api_key,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        timeout_seconds=options.timeout_seconds,
        max_retries=options.max_retries,
    )
    return ChatClient(chat, "the user model", _USER_REMEDY, http_client)


def user_maker(
    domain: Domain, options: UserOptions, client: ChatClient | None
) -> MakeUser | None:
    """How each episode gets its user.

    Args:
        client: of the user model, for `kind` "llm".
    """
    if domain.solo:
        return None

    def make(task: Task) -> User:
        if options.kind == "rule":
            return RuleUser(task, options.max_replies)
        assert client is not None
        return LLMUser(client, task, user_tools(domain.tau2_name))

    return make
