"""Logging: from code that may run without AReaL, and without secrets.

A light import: AReaL is touched only where it has been imported, or by the trainer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from areal_dta.config.redaction import redacted


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


@contextmanager
def secrets_redacted() -> Iterator[None]:
    """Let AReaL's loggers (W&B, SwanLab, Trackio) record a run without its secrets.

    For the time in which the trainer, and with it the loggers, is made.
    """
    from areal.utils import stats_logger

    before = stats_logger.asdict
    stats_logger.asdict = lambda config: redacted(before(config))
    try:
        yield
    finally:
        stats_logger.asdict = before
