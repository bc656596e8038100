"""AReaL's OpenAI proxy, for agents: ``python -m areal_dta.areal_fixes.agent_proxy``.

Third-party patches of areal 1.0.x with newer litellm, all of this process alone:

* The proxy imports ``litellm.llms.anthropic.experimental_pass_through``, which litellm
  1.108 has as ``...anthropic.pass_through``. Without the alias the process dies, and
  AReaL reports a time-out a minute later. Undone by: a litellm that has the module.
* ``chat_template_kwargs`` of a request, as SGLang and vLLM take them (for example
  ``{"enable_thinking": false}``), reach the chat template. AReaL's client takes them,
  but its server drops the field.
* A reply that is nothing but the end of the turn is an empty message. AReaL refuses it
  with status 500, so that its episode, and with it its whole prompt, is dropped, and
  the habit is never trained against.
* Exported sequences say which of them begins an episode (AReaL's key
  ``begin_of_trajectory``), so that an episode of many model calls counts its reward
  once where rewards are normalised.
* `areal_dta.processes.loopback_proxy` is the same, on loopback only.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

MODULE = "areal_dta.areal_fixes.agent_proxy"
AREAL_MODULE = "areal.experimental.openai.proxy.proxy_rollout_server"
LOOPBACK_MODULE = "areal_dta.processes.loopback_proxy"

_OLD = "litellm.llms.anthropic.experimental_pass_through"
_NEW = "litellm.llms.anthropic.pass_through"

_Message = dict[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]

_template_kwargs: contextvars.ContextVar[dict[str, Any] | None] = (
    contextvars.ContextVar("template_kwargs", default=None)
)


def alias_litellm() -> None:
    """Make litellm's module importable under the name that AReaL knows.

    Raises:
        RuntimeError: litellm has it under neither name.
    """
    # Otherwise litellm fetches its price list from the network while it is imported.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    if importlib.util.find_spec(_OLD) is not None:
        return
    if importlib.util.find_spec(_NEW) is None:
        raise RuntimeError(
            f"litellm {version('litellm')} has neither {_OLD} nor {_NEW}, which "
            "AReaL's agent proxy needs; install litellm 1.108"
        )
    for part in ("", ".adapters", ".adapters.transformation"):
        sys.modules[_OLD + part] = importlib.import_module(_NEW + part)


class TemplateKwargs:
    """ASGI middleware: keeps a request's ``chat_template_kwargs`` for its handler."""

    def __init__(self, app: Callable[..., Awaitable[None]], path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http" or scope["path"] != self._path:
            await self._app(scope, receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client hung up
            body += message.get("body", b"")
            more = message.get("more_body", False)
        _template_kwargs.set(_kwargs_of(body))
        replayed = False

        async def replay() -> _Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


def _kwargs_of(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body).get("chat_template_kwargs")
    except (ValueError, AttributeError):
        return {}  # the proxy itself refuses what is not a JSON object
    return value if isinstance(value, dict) else {}


def pass_template_kwargs(server: Any) -> None:
    """Let the proxy's client render prompts with the request's arguments."""
    set_up = server._setup_openai_client

    @functools.wraps(set_up)
    def set_up_with_kwargs() -> None:
        set_up()
        completions = server._openai_client.chat.completions
        create = completions.create

        @functools.wraps(create)
        async def create_with_kwargs(**kwargs: Any) -> Any:
            if given := _template_kwargs.get():
                kwargs["extra_body"] = {"chat_template_kwargs": given}
            return await create(**kwargs)

        completions.create = create_with_kwargs

    server._setup_openai_client = set_up_with_kwargs
    server.app.add_middleware(
        TemplateKwargs, path=f"/{server.CHAT_COMPLETIONS_PATHNAME}"
    )


def mark_trajectory_starts(server: Any) -> None:
    """Let the exported sequences of an episode tell its first one from the others."""
    serialize = server.serialize_interactions

    @functools.wraps(serialize)
    def serialize_marked(interactions: dict[str, Any]) -> Any:
        import torch

        for number, interaction in enumerate(interactions.values()):
            if interaction.has_tensor_data:  # makes the tensors, or returns them again
                tensors = interaction.to_tensor_dict()
                tensors["begin_of_trajectory"] = torch.tensor([int(number == 0)])
        return serialize(interactions)

    server.serialize_interactions = serialize_marked


def accept_empty_replies() -> Callable[[], None]:
    """Let a reply of nothing but stop tokens be the empty text.

    Returns:
        A function that undoes it.
    """
    from areal.api.io_struct import ModelResponse

    original = ModelResponse.output_tokens_without_stop

    def without_stop(self: Any) -> list[int]:
        stop = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
        ended = self.stop_reason not in ("length", "abort")
        if ended and self.output_tokens and stop.issuperset(self.output_tokens):
            return []
        tokens: list[int] = original.fget(self)
        return tokens

    ModelResponse.output_tokens_without_stop = property(without_stop)

    def undo() -> None:
        ModelResponse.output_tokens_without_stop = original

    return undo


def main(loopback: bool = False) -> None:
    if not (found := version("areal")).startswith("1.0."):
        raise RuntimeError(f"{MODULE} is checked with areal 1.0.x, found {found}")
    alias_litellm()
    server = importlib.import_module(AREAL_MODULE)
    pass_template_kwargs(server)
    mark_trajectory_starts(server)
    accept_empty_replies()
    if loopback:
        from areal_dta.areal_fixes.loopback import LOOPBACK, use_loopback

        use_loopback()
        sys.argv += ["--host", LOOPBACK]  # the last one counts
    server.main()


if __name__ == "__main__":
    main()
