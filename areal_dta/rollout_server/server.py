"""Process of the local rollout server: `python -m areal_dta.rollout_server.server`.

Starts with the port (taken before the model is loaded, so that a conflict shows at
once), then the model, then HTTP; `/health` therefore answers only when requests can be
served. Ends on SIGTERM and SIGINT, and when the process that started it is gone.
"""

import argparse
import asyncio
import errno
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from pydantic import TypeAdapter, ValidationError

from areal_dta.config.server_options import (
    SPARE_FILES,
    TOKEN_VARIABLE,
    LocalServerConfig,
    is_loopback,
)
from areal_dta.rollout_server.http_rules import ReasonProtocol
from areal_dta.rollout_server.protocol import describe_errors

if TYPE_CHECKING:
    from fastapi import FastAPI

    from areal_dta.rollout_server.generation_thread import GenerationThread

logger = logging.getLogger(__name__)

EXIT_BAD_CONFIG = 2
#: The port was taken between choosing and binding it; the rollout worker tries another.
EXIT_PORT_IN_USE = 3
EXIT_GENERATION_DIED = 4

_LISTEN_ERRORS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
_PARENT_POLL_SECONDS = 0.5
# AReaL waits five seconds between SIGTERM and SIGKILL.
_THREAD_STOP_SECONDS = 2.0
_HTTP_STOP_SECONDS = 1
# Longer than clients keep an idle connection (`areal_fixes/rollout_workers.py`).
_KEPT_OPEN_SECONDS = 75
_ORPHAN_EXIT_SECONDS = 5.0
_POLL_SECONDS = 0.2
# A dead generation thread is told to clients this long, before the port closes.
_DEAD_LINGER_SECONDS = 5.0


def parse_options(options: dict[str, Any] | str) -> LocalServerConfig:
    """Build the options from a dictionary, or from its JSON.

    Raises:
        ValueError: a key is no option of this server, or its value has another type.
    """
    adapter = TypeAdapter(LocalServerConfig)
    try:
        if isinstance(options, str):
            return adapter.validate_json(options)
        return adapter.validate_python(options)
    except ValidationError as error:
        raise ValueError(
            f"options of the local rollout server: {describe_errors(error.errors())}"
        ) from None


def build_command(config: LocalServerConfig, parent_pid: int | None) -> list[str]:
    """Build the command that serves `config`; it ends when `parent_pid` does."""
    command = [sys.executable, "-m", "areal_dta.rollout_server.server"]
    command.append(json.dumps(asdict(config)))
    return command if parent_pid is None else [*command, f"--parent-pid={parent_pid}"]


def watch_parent(parent_pid: int) -> None:
    """End this process when `parent_pid` is no longer its parent.

    It polls: Linux' parent-death signal fires when the *thread* that started the child
    ends, and AReaL starts servers from short-lived threads.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_POLL_SECONDS)
        logger.warning("Process %d, which started this server, is gone.", parent_pid)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_EXIT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def open_socket(host: str, port: int) -> socket.socket:
    """Take the port without listening yet.

    Raises:
        OSError: the address is in use or does not belong to this machine.
    """
    family, kind, proto, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _raise_file_limit(num_connections: int) -> None:
    """Let the process hold that many connections, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        new = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))


class _Server(uvicorn.Server):
    """Server that ends the generation first, so that waiting requests are answered."""

    def __init__(self, app: "FastAPI", thread: "GenerationThread") -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=ReasonProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                backlog=4096,
                timeout_keep_alive=_KEPT_OPEN_SECONDS,
                timeout_graceful_shutdown=_HTTP_STOP_SECONDS,
            )
        )
        self._thread = thread

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again at the end: another exit code.
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._thread.stop, _THREAD_STOP_SECONDS)
        await super().shutdown(sockets)


async def serve(app: "FastAPI", thread: "GenerationThread", sock: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT, or until the generation thread has died.

    Returns the exit code. The generation thread may still be in a step.
    """
    server = _Server(app, thread)
    serving = asyncio.create_task(server.serve([sock]))
    while thread.is_alive and not serving.done():
        await asyncio.wait([serving], timeout=_POLL_SECONDS)
    # `shutdown` ends the thread, too: only without a signal has it died.
    died = not server.should_exit and not serving.done()
    if died:
        await asyncio.wait([serving], timeout=_DEAD_LINGER_SECONDS)
        server.should_exit = True
    await serving
    return EXIT_GENERATION_DIED if died else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m areal_dta.rollout_server.server",
        description="Embedded rollout server for AReaL, after SGLang's protocol.",
    )
    parser.add_argument(
        "options", help="JSON of a configuration's section `local`, with model_path."
    )
    parser.add_argument(
        "--parent-pid", type=int, help="End when this process is no longer the parent."
    )
    args = parser.parse_args(argv)
    if args.parent_pid is not None:
        watch_parent(args.parent_pid)
    try:
        config = parse_options(args.options)
        config.validate()
        token = os.environ.pop(TOKEN_VARIABLE, None) or None
        if token is None and not is_loopback(config.host):
            raise ValueError(
                f"host={config.host!r} can be reached from other machines; set "
                f"{TOKEN_VARIABLE} to a secret that the clients know."
            )
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s rollout server %(levelname)s: %(message)s",
    )
    try:
        sock = open_socket(config.host, config.port)
        # Takes seconds, so what can be wrong without it has been checked before.
        from areal_dta.rollout_server.app import build_app

        _raise_file_limit(config.queue_limit())
        app, thread = build_app(config, token)
        return asyncio.run(serve(app, thread, sock))
    except KeyboardInterrupt:  # while loading; later on SIGINT ends `serve`
        return 128 + signal.SIGINT
    except ValueError as error:
        logger.error("%s", error)
        return EXIT_BAD_CONFIG
    except OSError as error:
        if error.errno not in _LISTEN_ERRORS:
            raise
        logger.error("Cannot listen on %s port %d: %s", config.host, config.port, error)
        return EXIT_PORT_IN_USE if error.errno == errno.EADDRINUSE else EXIT_BAD_CONFIG


if __name__ == "__main__":
    code = main()
    # Taking the interpreter down takes seconds on a busy machine, and can crash while
    # the generation thread is inside PyTorch.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
