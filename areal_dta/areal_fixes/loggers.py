"""Log from code that may run without AReaL. (Separate module: stays light.)"""

from __future__ import annotations

import logging
import sys


def task_logger(name: str) -> logging.Logger:
    """Return a logger for one message; ask anew for the next.

    AReaL replaces Python's root logger whenever it makes a logger of its own, so that
    loggers made before reach nobody, and the launcher shows what has AReaL's format:
    where AReaL runs, its own kind of logger is the one that is read.
    """
    if "areal.utils.logging" in sys.modules:
        from areal.utils import logging as areal_logging

        logger: logging.Logger = areal_logging.getLogger(name)
        return logger
    return logging.getLogger(name)
