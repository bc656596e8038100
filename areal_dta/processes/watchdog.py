"""End a script that waits for a worker which is dead or does not answer.

The launcher watches its training process from outside. In an own script the thread that
waits is the main one, so another interrupts it, as Ctrl-C would, and leaves the reason.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Watchdog:
    """Interrupts the main thread when it is told to, or when a time limit is over.

    Args:
        on_stuck: called from another thread if the main thread has not left `watching`
            some time after it was interrupted; it should end what that waits for.
        grace_seconds: that time.
    """

    def __init__(self, on_stuck: Callable[[], object], grace_seconds: float) -> None:
        self._on_stuck, self._grace_seconds = on_stuck, grace_seconds
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._late = ""
        self._reason = ""
        self._is_watching = False
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )
        self._thread.start()

    def expect(self, what: str, seconds: float, key: str) -> None:
        """Allow so many seconds from now until the next call.

        Args:
            what: is waited for.
            key: of the configuration, that sets the limit.
        """
        with self._changed:
            self._deadline = time.monotonic() + seconds
            self._late = (
                f"no progress: waited {seconds:.0f} s for {what}; see the logs, or "
                f"raise {key}"
            )
            self._changed.notify()

    def stop(self, reason: str) -> None:
        """Interrupt the main thread if it is `watching`; from any thread."""
        with self._changed:
            if self._reason or not self._is_watching or self._is_closed:
                return
            self._reason = reason
            self._deadline = time.monotonic() + self._grace_seconds
            self._changed.notify()
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            signal.pthread_kill(main_thread, signal.SIGINT)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let the main thread be interrupted while the context is active.

        Raises:
            RuntimeError: it was, with the reason.
        """
        with self._changed:
            self._is_watching = True
        # Shells start background jobs with SIGINT ignored: then ours alone counts.
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if is_ignored:
            signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        except KeyboardInterrupt:
            if not self._reason:
                raise  # the user's Ctrl-C
            raise RuntimeError(self._reason) from None
        finally:
            with self._changed:
                self._is_watching = False
                self._deadline = None
            if is_ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._reason:
            raise KeyboardInterrupt

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout=10.0)

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                left = None
                if self._deadline is not None:
                    left = self._deadline - time.monotonic()
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                self._deadline = None  # or what `stop` sets: the lock is reentrant
                if self._reason:
                    self._on_stuck()
                else:
                    self.stop(self._late)
