"""Events from the process that trains to the launcher that shows: JSON lines."""

from __future__ import annotations

import json
import os
import threading
from typing import Any


class EventWriter:
    """Sends events over a file descriptor; thread-safe.

    Kinds: ``status`` (text), ``note`` (text), ``start`` (algorithm, num_steps,
    time-outs), ``step`` (a step's record), ``config_error`` and ``error`` (text),
    ``done`` (checkpoint).
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # workers must not keep the pipe open
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, kind: str, **values: Any) -> None:
        data = (json.dumps({"kind": kind, **values}) + "\n").encode()
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]
