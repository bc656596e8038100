"""Warnings and errors in a run's log, each kind once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_ALERTS = 20

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# AReaL's format: (AReaL) date name LEVEL: message
_LINE = re.compile(
    r"\(AReaL\) \S+ (?P<name>.+?) (?P<level>WARNING|ERROR|CRITICAL): (.*)"
)
_VARYING = re.compile(r"0x[0-9a-f]+|\d+")
NOISE: Final = (
    # Meant for clusters: a run on one machine needs no network file system.
    "is not on a network filesystem",
)


@dataclass(frozen=True, slots=True)
class Alert:
    level: str
    text: str

    @property
    def is_error(self) -> bool:
        return self.level != "WARNING"


class AlertReader:
    """Reader that follows a growing log file."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")
        self._partial = b""
        self._seen: set[str] = set()

    def read_new(self) -> list[Alert]:
        """Return the alerts written since the last call, without repetitions."""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)  # the log was rotated
        *lines, self._partial = (self._partial + self._file.read()).split(b"\n")
        texts = [line.decode(errors="replace") for line in lines]
        return [alert for line in texts if (alert := self._alert(line)) is not None]

    def close(self) -> None:
        self._file.close()

    def _alert(self, line: str) -> Alert | None:
        match = _LINE.search(_ANSI.sub("", line))
        if match is None or any(noise in line for noise in NOISE):
            return None
        text = f"{match['name']}: {match[3]}"
        kind = _VARYING.sub("#", text)
        if kind in self._seen or len(self._seen) > MAX_ALERTS:
            return None
        self._seen.add(kind)
        if len(self._seen) > MAX_ALERTS:
            return Alert("WARNING", "more warnings follow in the log")
        return Alert(match["level"], text)
