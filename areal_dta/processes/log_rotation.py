"""Bound the size of a log file that other processes keep open for appending.

The file is copied and then cut, as logrotate's ``copytruncate`` does: its writers need
not know. A line that arrives between the two may be lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

NUM_KEPT: Final = 4
"""Number of older files: ``launch.log.1`` is the latest."""


def rotate(path: Path, max_bytes: float) -> bool:
    """Move the contents to ``<name>.1`` if there are too many; return whether.

    Files that were there move to the next number; the oldest goes.
    """
    if path.stat().st_size <= max_bytes:
        return False
    for number in range(NUM_KEPT, 1, -1):
        older = _numbered(path, number - 1)
        if older.exists():
            older.replace(_numbered(path, number))
    with open(path, "rb+") as log, open(_numbered(path, 1), "wb") as kept:
        shutil.copyfileobj(log, kept)
        while rest := log.read():  # written meanwhile
            kept.write(rest)
        log.truncate(0)
    return True


def remove_rotated(path: Path) -> None:
    """Remove what an earlier run has left beside a log that starts anew."""
    for number in range(1, NUM_KEPT + 1):
        _numbered(path, number).unlink(missing_ok=True)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
