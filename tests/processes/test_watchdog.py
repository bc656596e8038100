"""A script that waits too long, or for a dead worker, is interrupted with a reason."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from areal_dta.processes.watchdog import Watchdog

WAIT_SECONDS = 30.0  # as long as a test could hang if nothing interrupted it


@pytest.fixture(autouse=True, params=["foreground", "background"])
def sigint(request: pytest.FixtureRequest) -> Iterator[str]:
    """Shells start background jobs with SIGINT ignored."""
    is_ignored = request.param == "background"
    handler = signal.SIG_IGN if is_ignored else signal.default_int_handler
    before = signal.signal(signal.SIGINT, handler)
    yield request.param
    assert signal.signal(signal.SIGINT, before) is handler


@pytest.fixture
def stuck() -> list[int]:
    return []


@pytest.fixture
def watchdog(stuck: list[int]) -> Iterator[Watchdog]:
    watchdog = Watchdog(lambda: stuck.append(1), grace_seconds=0.2)
    yield watchdog
    watchdog.close()


def test_a_time_limit_interrupts_with_its_key(watchdog: Watchdog) -> None:
    watchdog.expect("step 3", 0.2, "launch.step_timeout_seconds")
    with pytest.raises(RuntimeError, match=r"step 3.*launch\.step_timeout_seconds"):
        with watchdog.watching():
            time.sleep(WAIT_SECONDS)


def test_progress_extends_the_limit(watchdog: Watchdog) -> None:
    with watchdog.watching():
        for _ in range(4):
            watchdog.expect("a step", 0.4, "key")
            time.sleep(0.2)


def test_another_thread_stops_it_with_a_reason(watchdog: Watchdog) -> None:
    reason = "worker actor/0 has died"
    timer = threading.Timer(0.1, watchdog.stop, [reason])
    timer.start()
    with pytest.raises(RuntimeError, match=reason):
        with watchdog.watching():
            timer.join()
            time.sleep(WAIT_SECONDS)


def test_nothing_happens_outside(watchdog: Watchdog) -> None:
    watchdog.stop("too late")
    watchdog.expect("nothing", 0.05, "key")
    time.sleep(0.2)
    with watchdog.watching():  # neither is remembered
        time.sleep(0.1)


def test_what_ignores_the_interrupt_is_ended(
    watchdog: Watchdog, stuck: list[int]
) -> None:
    with watchdog.watching():
        try:
            watchdog.stop("stuck")
            time.sleep(WAIT_SECONDS)
        except KeyboardInterrupt:
            deadline = time.monotonic() + WAIT_SECONDS
            while not stuck and time.monotonic() < deadline:
                time.sleep(0.05)
    assert stuck == [1]


def test_an_ignored_interrupt_stays_ignored(watchdog: Watchdog, sigint: str) -> None:
    if sigint == "background":
        with watchdog.watching():
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_stays_ctrl_c(watchdog: Watchdog) -> None:
    with pytest.raises(KeyboardInterrupt), watchdog.watching():
        raise KeyboardInterrupt
