"""A client of an OpenAI-compatible server, bounded in time and in retries.

Serves the agent (AReaL's proxy, or any server in an evaluation) and the simulated user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
from openai import AsyncOpenAI

from recipes.replies import Message

# What servers say when the conversation has outgrown them.
_TOO_LONG = ("max_total_tokens", "context length", "context_length", "maximum context")


class ServerError(RuntimeError):
    """The server is down, slow, or refuses; the message says which, and the remedy."""


class ContextFullError(RuntimeError):
    """The conversation no longer fits the model."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Server and settings of each request."""

    base_url: str
    model: str = "default"
    api_key: str = "none"
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    timeout_seconds: float = 600.0
    max_retries: int = 0
    """Retried are connection errors, time-outs, and status 408, 409, 429 and 5xx."""
    extra_body: dict[str, Any] = field(default_factory=dict)


class ChatClient:
    """Requests completions, one message at a time."""

    def __init__(
        self, options: ChatOptions, name: str, remedy: str, http_client: Any = None
    ) -> None:
        """
        Args:
            name: what errors call the server, e.g. "the user model".
            remedy: what to do when it does not answer.
            http_client: a shared `httpx.AsyncClient`, which its owner closes.
        """
        self._options = options
        self._name = name
        self._remedy = remedy
        self._owns_http_client = http_client is None
        self._client = AsyncOpenAI(
            base_url=options.base_url,
            api_key=options.api_key,
            timeout=options.timeout_seconds,
            max_retries=options.max_retries,
            http_client=http_client,
        )

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        tool_choice: str | None = None,
    ) -> Message:
        """Return the next assistant message as the server sent it, without null fields.

        Raises:
            ServerError: no answer within the time and the retries, or a refusal.
            ContextFullError: the conversation has become too long.
        """
        options = self._options
        request: dict[str, Any] = {
            "model": options.model,
            "messages": list(messages),
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_tokens": options.max_tokens,
            **options.extra_body,
        }
        if tools:
            request["tools"] = list(tools)
            if tool_choice is not None:
                request["tool_choice"] = tool_choice
        try:
            # Not `chat.completions.create`: it walks over all messages and tools, which
            # takes milliseconds per call, during which no other episode can go on.
            answer: Any = await self._client.post(
                "/chat/completions", cast_to=object, body=request
            )
        except openai.APITimeoutError as error:
            waited = f"{options.timeout_seconds:g} s, {options.max_retries + 1} times"
            raise self._error(f"did not answer within {waited}") from error
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise self._error(f"cannot be reached ({cause})") from error
        except openai.APIStatusError as error:
            said = error.response.text
            if any(text in said for text in _TOO_LONG):
                raise ContextFullError(said) from error
            status = error.status_code
            raise self._error(f"refused, status {status}: {said:.300}") from error
        except openai.APIError as error:
            raise self._error(f"answered with nonsense: {error!s:.300}") from error
        try:
            message: Message = _without_nulls(answer["choices"][0]["message"])
        except (TypeError, KeyError, IndexError) as error:
            raise self._error(f"answered with nonsense: {answer!r:.300}") from error
        message.setdefault("content", "")
        return message

    async def close(self) -> None:
        if self._owns_http_client:
            await self._client.close()

    def _error(self, what: str) -> ServerError:
        return ServerError(
            f"{self._name} at {self._options.base_url} {what}; {self._remedy}"
        )


def proxy_client(
    proxy: Mapping[str, Any], enable_thinking: bool, **options: Any
) -> ChatClient:
    """Build the client of AReaL's rollout proxy.

    Args:
        proxy: its `base_url`, `api_key` and `http_client`, as AReaL names them.
        enable_thinking: passed to the model's chat template.
        options: the other fields of `ChatOptions`.
    """
    chat = ChatOptions(
        base_url=proxy["base_url"],
        api_key=proxy["api_key"],
        extra_body={"chat_template_kwargs": {"enable_thinking": enable_thinking}},
        **options,
    )
    remedy = "see proxy-rollout.log; the rollout server may have died"
    return ChatClient(chat, "the rollout proxy", remedy, proxy["http_client"])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
