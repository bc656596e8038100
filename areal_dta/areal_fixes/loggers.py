"""Logging: from code without AReaL, without secrets, and without what is disabled.

A light import: AReaL is touched only where it has been imported, or by the trainer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

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


def skip_disabled_swanlab(mode: str) -> Callable[[], None]:
    """Leave SwanLab out of AReaL's statistics if its mode is ``disabled``.

    Call it before AReaL's `StatsLogger` is made.

    Returns:
        A function that undoes it.
    """
    from areal.utils import stats_logger

    module: Any = stats_logger
    original = module.swanlab
    if mode == "disabled":

        def nothing(*args: object, **kwargs: object) -> None: ...

        names = ("login", "init", "log", "finish")
        module.swanlab = SimpleNamespace(**dict.fromkeys(names, nothing))

    def undo() -> None:
        module.swanlab = original

    return undo
