"""HTTP rules that hold for every endpoint: bodies, clients that hang up, refusals.

A refusal is JSON, and its message is repeated in the reason phrase of the status line:
AReaL's client logs the reason of a failed request, but not its body.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from areal_dta.config.server_options import TOKEN_VARIABLE, is_loopback
from areal_dta.rollout_server.protocol import describe_errors

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
_MAX_REASON_CHARS = 300
#: Carries the message from the application to the connection: ASGI has no reason.
_REASON_HEADER = "x-reason"
_REASON_IN_HEAD = re.compile(rb"\r\n" + _REASON_HEADER.encode() + rb": ([^\r]*)\r\n")
_STATUS = re.compile(rb"HTTP/1\.1 [45]\d\d ")


@dataclass(frozen=True, slots=True)
class Guard:
    """Who may use the server: `Host` of its own address, and the run's secret."""

    host: str = "127.0.0.1"
    token: str | None = None

    def check_host(self, request: Request) -> None:
        """Refuse names of others, which a web page may point at this machine."""
        got = request.url.hostname or ""
        # Beyond loopback, the server does not know its names, and has a token.
        if got != self.host and is_loopback(self.host) and not is_loopback(got):
            raise HTTPException(
                421, f"host {got!r:.100} is not this server; use its address."
            )

    async def check_token(self, request: Request) -> None:
        """Compare the body's `token`, or the header `Authorization: Bearer`."""
        if self.token is None:
            return
        got: Any = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not got:
            try:
                body = await request.json()  # kept for the handler
                got = body.get("token") if isinstance(body, dict) else None
            except (ValueError, RecursionError):  # not even text, or not JSON
                got = None
        expected = self.token.encode()
        if not isinstance(got, str) or not secrets.compare_digest(
            got.encode(errors="replace"), expected
        ):
            raise HTTPException(
                401,
                f"no token, or a wrong one; send the server's {TOKEN_VARIABLE} as "
                "`token` in the body.",
            )


def create_app(guard: Guard, statuses: Mapping[type[Exception], int]) -> FastAPI:
    """Create an application without endpoints.

    Args:
        guard: checks every request to an endpoint.
        statuses: status that answers an error which an endpoint raises.
    """
    app = FastAPI(openapi_url=None)  # nobody browses it
    app.router.route_class = _Route
    app.state.guard = guard

    async def refuse_invalid(
        request: Request, error: RequestValidationError
    ) -> Response:
        return _refuse(400, describe_errors(error.errors()))

    async def refuse(request: Request, error: StarletteHTTPException) -> Response:
        return _refuse(error.status_code, error.detail)

    async def answer_error(request: Request, error: Exception) -> Response:
        kind = next(k for k in type(error).__mro__ if k in statuses)
        return _refuse(statuses[kind], str(error))

    # A bug of ours must not take the server down; Uvicorn logs its traceback.
    async def answer_bug(request: Request, error: Exception) -> Response:
        return _refuse(500, f"internal error: {error!r}")

    handlers: dict[Any, Any] = {
        RequestValidationError: refuse_invalid,
        StarletteHTTPException: refuse,
        **dict.fromkeys(statuses, answer_error),
        Exception: answer_bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    return app


class _Route(APIRoute):
    """Route that bounds and checks bodies, and ends its handler with the client.

    A client that hangs up must not leave its request running: cancelling the handler
    cancels the future for which it waits.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_until_disconnect(request: Request) -> Response:
            guard: Guard = request.app.state.guard
            guard.check_host(request)
            if request.method == "POST":
                request = _limit_body(request)
                _check_content_type(request)
                await request.body()  # kept for the handler; then only the end comes
                await guard.check_token(request)
            handling = asyncio.ensure_future(handle(request))
            hanging_up = asyncio.ensure_future(_wait_for_disconnect(request))
            try:
                await asyncio.wait(
                    {handling, hanging_up}, return_when=asyncio.FIRST_COMPLETED
                )
                # Nobody reads the answer to a client that is gone.
                return await handling if handling.done() else Response(status_code=499)
            finally:
                handling.cancel()
                hanging_up.cancel()

        return handle_until_disconnect


def _check_content_type(request: Request) -> None:
    # Also keeps web pages in a browser on this machine from posting here unasked.
    got = request.headers.get("content-type", "")
    if got.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(400, f"content type {got!r}; expected application/json.")


def _limit_body(request: Request) -> Request:
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"body of more than {MAX_BODY_BYTES} bytes.")
        return message

    return Request(request.scope, receive)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refuse(status: int, message: str) -> JSONResponse:
    logger.info("Answered with status %d: %s", status, message)
    line = " ".join(message.split()).encode("ascii", "replace").decode()
    return JSONResponse(
        {"error": {"message": message, "code": status}},
        status,
        {_REASON_HEADER: line[:_MAX_REASON_CHARS]},
    )


class _ReasonTransport:
    """Transport that moves the reason of a refusal into the status line."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        # Status line and headers of a response come in one piece, without its body.
        status = _STATUS.match(data)
        reason = _REASON_IN_HEAD.search(data) if status else None
        if status and reason:
            data = status[0] + reason[1] + data[data.index(b"\r\n") :]
        self._transport.write(data)


class ReasonProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol, with our reason phrases."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, _ReasonTransport(transport))
