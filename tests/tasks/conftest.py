"""Warnings of the tasks, whatever the logging of the other tests' libraries."""

import logging

import pytest

from areal_dta.tasks import gsm8k, math_reward


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of the warnings given so far."""
    texts: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger = logging.Logger("collected", logging.WARNING)
    logger.addHandler(Collector())
    for module in (gsm8k, math_reward):
        monkeypatch.setattr(module, "task_logger", lambda name: logger)
    return texts
