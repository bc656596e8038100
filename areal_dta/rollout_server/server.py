"""Process of the local rollout server: `python -m areal_dta.rollout_server.server`.

Starts with the port (taken before the model is loaded, so that a conflict shows at
once), then the model, then HTTP; `/health` therefore answers only when requests can be
served. Ends on SIGTERM and SIGINT, and when the process that started it is gone.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from areal_dta.rollout_server.config import (
    EXIT_BAD_CONFIG,
    EXIT_GENERATION_DIED,
    EXIT_PORT_IN_USE,
    parse_command,
)

if TYPE_CHECKING:
    from areal_dta.rollout_server.generation_thread import GenerationWorker

logger = logging.getLogger(__name__)

_LISTEN_ERRORS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
_PARENT_POLL_SECONDS = 0.5
# AReaL waits five seconds between SIGTERM and SIGKILL.
_WORKER_STOP_SECONDS = 2.0
_HTTP_STOP_SECONDS = 1.0
_ORPHAN_EXIT_SECONDS = 5.0
_WORKER_POLL_SECONDS = 1.0
# A dead generation thread is told to clients this long, before the port closes.
_DEAD_LINGER_SECONDS = 5.0


def watch_parent(parent_pid: int) -> None:
    """End this process when `parent_pid` is no longer its parent.

    By polling: Linux' parent-death signal fires when the *thread* that started the
    child ends, and AReaL starts servers from short-lived threads.
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


async def serve(
    app: web.Application, worker: "GenerationWorker", sock: socket.socket
) -> int:
    """Serve until SIGTERM or SIGINT, or until the generation thread has died.

    Returns the exit code. The generation thread may still be in a step.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    # A client that hangs up must not leave its request running.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=_HTTP_STOP_SECONDS,
        access_log=None,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=1024).start()
        logger.info("Listening on %s.", sock.getsockname())
        while worker.is_alive and not await _is_set(stop, _WORKER_POLL_SECONDS):
            pass
        if stop.is_set():
            return 0
        await _is_set(stop, _DEAD_LINGER_SECONDS)
        return EXIT_GENERATION_DIED
    finally:
        await asyncio.to_thread(worker.stop, _WORKER_STOP_SECONDS)
        await runner.cleanup()


async def _is_set(event: asyncio.Event, timeout_seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_seconds)
    except TimeoutError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    config, parent_pid = parse_command(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s rollout server %(levelname)s: %(message)s",
    )
    if parent_pid is not None:
        watch_parent(parent_pid)
    try:
        config.validate()
        sock = open_socket(config.host, config.port)
        # Takes seconds, so what can be wrong without it has been checked before.
        from areal_dta.rollout_server.build import build_app

        app, worker = build_app(config)
        return asyncio.run(serve(app, worker, sock))
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
