"""What rollout workers do anew for every request, or find out too late.

Where a small model answers within milliseconds, these take longer than the model.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final

import aiohttp
from areal.infra import RemoteInfEngine, RolloutController, remote_inf_engine
from areal.infra.utils.concurrent import register_loop_cleanup
from areal.utils import name_resolve, names, pkg_version

#: How long a connection without a request stays open. Servers must keep it for longer:
#: one that closes it just when it is used again costs a retry.
KEPT_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.02
SAVE_TIMEOUT_SECONDS: Final = 600.0
_GENERATE: Final = "/generate"

_is_paused: ContextVar[Callable[[], bool] | None] = ContextVar("paused", default=None)


def remember_versions() -> Callable[[], None]:
    """Look up the version of an installed package once per process.

    Returns:
        A function that undoes it.
    """
    stock = pkg_version.get_version
    pkg_version.get_version = functools.cache(stock)

    def undo() -> None:
        pkg_version.get_version = stock

    return undo


def keep_connections() -> Callable[[], None]:
    """Send generation requests of this process over connections that stay open.

    Also holds an interrupted answer back until generation is resumed, for
    `PromptlyResumed`.

    Returns:
        A function that undoes it.
    """
    stock = remote_inf_engine.arequest_with_retry
    sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def request(*args: Any, **kwargs: Any) -> Any:
        # Requests without a session of their loop are rare, and no generations.
        if kwargs.get("endpoint") == _GENERATE and kwargs.get("session") is not None:
            kwargs["session"] = _kept_session(sessions)
        result = await stock(*args, **kwargs)
        is_paused = _is_paused.get()
        if is_paused is not None and _is_interrupted(result):
            await _wait_while(is_paused)
        return result

    remote_inf_engine.arequest_with_retry = request

    def undo() -> None:
        remote_inf_engine.arequest_with_retry = stock

    return undo


class PromptlyResumed(RemoteInfEngine):
    """Client whose requests go on as soon as generation is resumed."""

    async def agenerate(self, req: Any) -> Any:
        is_paused = self.workflow_executor.is_paused
        await _wait_while(is_paused)
        token = _is_paused.set(is_paused)
        try:
            return await super().agenerate(req)
        finally:
            _is_paused.reset(token)


def load_when_saved(controller: RolloutController) -> None:
    """Delay `update_weights_from_disk` until the checkpoint has been written.

    The trainer saves a checkpoint and announces it in the name service, each rollout
    worker waits for that entry and tells its server to load. But workers look only once
    per second, and miss the entry by a few milliseconds nearly every time. Here the
    controller looks first, more often, and passes the update on when the checkpoint is
    there, so that the workers find it at their first look. The entry before, which
    nobody waits for any more and AReaL leaves for ever, is deleted.

    Undone by deleting the controller's own attribute of that name.
    """
    update = controller.update_weights_from_disk

    async def update_when_saved(meta: Any) -> None:
        config = controller.config
        # The name's version is the one that the servers still have.
        version = controller.get_version()
        trial = config.experiment_name, config.trial_name
        name_resolve.wait(
            names.update_weights_from_disk(*trial, version),
            timeout=SAVE_TIMEOUT_SECONDS,
            poll_frequency=POLL_SECONDS,
        )
        await update(meta)
        with suppress(name_resolve.NameEntryNotFoundError):  # of the first update
            name_resolve.delete(names.update_weights_from_disk(*trial, version - 1))

    controller.update_weights_from_disk = update_when_saved


async def _wait_while(is_paused: Callable[[], bool]) -> None:
    # Without a time limit, as AReaL's own wait: whoever pauses also resumes.
    while is_paused():
        await asyncio.sleep(POLL_SECONDS)


def _is_interrupted(result: Any) -> bool:
    meta = result.get("meta_info") if isinstance(result, Mapping) else None
    finish = meta.get("finish_reason") if isinstance(meta, Mapping) else None
    return isinstance(finish, Mapping) and finish.get("type") == "abort"


def _kept_session(
    sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession],
) -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    session = sessions.get(loop)
    if session is None or session.closed:
        connector = aiohttp.TCPConnector(
            limit=0, use_dns_cache=False, keepalive_timeout=KEPT_SECONDS
        )
        # Time limits come with each request.
        session = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20)
        sessions[loop] = session
        register_loop_cleanup(functools.partial(_close, sessions, loop), loop=loop)
    return session


async def _close(
    sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession],
    loop: asyncio.AbstractEventLoop,
) -> None:
    session = sessions.pop(loop, None)
    if session is not None:
        await session.close()
