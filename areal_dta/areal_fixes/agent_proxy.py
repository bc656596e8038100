"""AReaL's OpenAI proxy, for agents: ``python -m areal_dta.areal_fixes.agent_proxy``.

Four repairs, all of this process alone; `registry` has their faults and remedies:
``litellm_alias``, ``template_kwargs``, ``trajectory_starts``, ``empty_replies``. Its
server listens on loopback only where the worker that forked it does.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Any

from fastapi import Request, Response
from starlette.middleware.base import (
    BaseHTTPMiddleware,
    DispatchFunction,
    RequestResponseEndpoint,
)

from areal_dta.areal_fixes.loopback import LOOPBACK, LOOPBACK_VARIABLE, use_loopback
from areal_dta.areal_fixes.registry import wrapped

MODULE = "areal_dta.areal_fixes.agent_proxy"
AREAL_MODULE = "areal.experimental.openai.proxy.proxy_rollout_server"

_OLD = "litellm.llms.anthropic.experimental_pass_through"
_NEW = "litellm.llms.anthropic.pass_through"

_template_kwargs: contextvars.ContextVar[dict[str, Any] | None] = (
    contextvars.ContextVar("template_kwargs", default=None)
)


def our_proxy(scheduler: Any) -> AbstractContextManager[None]:
    """Let a scheduler start this module where AReaL asks for its own proxy."""

    def start_ours(fork: Callable[..., Any]) -> Callable[..., Any]:
        def forked(*args: Any, command: str | None = None, **kwargs: Any) -> Any:
            ours = MODULE if command == AREAL_MODULE else command
            return fork(*args, command=ours, **kwargs)

        return forked

    return wrapped(scheduler, "fork_workers", start_ours)


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


def keep_template_kwargs(path: str) -> DispatchFunction:
    """Return a middleware that keeps `chat_template_kwargs` of requests to a path."""

    async def keep(request: Request, call_next: RequestResponseEndpoint) -> Response:
        if request.url.path == path:
            _template_kwargs.set(_kwargs_of(await request.body()))
        return await call_next(request)

    return keep


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
        BaseHTTPMiddleware,
        dispatch=keep_template_kwargs(f"/{server.CHAT_COMPLETIONS_PATHNAME}"),
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


def main() -> None:
    alias_litellm()
    server = importlib.import_module(AREAL_MODULE)
    pass_template_kwargs(server)
    mark_trajectory_starts(server)
    accept_empty_replies()
    if os.environ.get(LOOPBACK_VARIABLE):
        use_loopback()
        sys.argv += ["--host", LOOPBACK]  # the last one counts
    server.main()


if __name__ == "__main__":
    main()
