"""Where a PPO trainer waits in a step, and why.

The trainer's thread is followed through the calls in which it does nothing itself.
Where calls are nested, the outer one counts, so that the seconds of a step never add up
to more than it lasted; what is left is the trainer's own work.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from areal_dta.areal_fixes.registry import wrapped

Call = Callable[..., Any]


class WaitMeter:
    """Meter of a trainer's waits, by reason. All but `watch_staleness` is for one
    thread, the trainer's.

    ``rollout``: the batch is not ready, its rollouts run. ``policy_too_old``: it is not
    ready because no rollout ran while the last one was trained on, for any that started
    then would have been too old. ``workers``: the ranks train, or compute what training
    needs. ``weights``: new weights are saved, and loaded by the servers.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._is_waiting = False
        self._lock = threading.Lock()
        self._idle_seconds = 0.0
        self._idle_since: float | None = None

    def take_metrics(self, plan_seconds: float = 0.0) -> dict[str, float]:
        """Return the seconds since the last call, as ``wait/{reason}``.

        Args:
            plan_seconds: spent on waiting for the collector and the batch's plan, which
                the collector measures.
        """
        seconds, self._seconds = self._seconds, defaultdict(float)
        seconds["plan"] = plan_seconds
        reasons = ("rollout", "policy_too_old", "plan", "workers", "weights")
        return {f"wait/{reason}": seconds[reason] for reason in reasons}

    @contextmanager
    def watch(self, rollout: Any, actor: Any, *others: Any) -> Iterator[None]:
        """Follow controllers while the context is active.

        Args:
            rollout: AReaL's `RolloutController`, initialized.
            actor: the actor's `TrainController`.
            others: further ones; None is left out.
        """
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(self.watch_staleness(rollout))
            enter(wrapped(rollout, "prepare_batch", self._rollout_waits))
            enter(wrapped(actor, "update_weights", self._waits("weights")))
            for controller in filter(None, (actor, *others)):
                for name in ("_custom_function_call", "_call_heads"):
                    if hasattr(controller, name):
                        enter(wrapped(controller, name, self._waits("workers")))
            yield

    @contextmanager
    def watch_staleness(self, rollout: Any) -> Iterator[None]:
        """Note when no rollout runs because it would be too old; from any thread."""

        def note_after(call: Callable[..., None]) -> Callable[..., None]:
            def noted(*args: Any) -> None:
                call(*args)
                self._note_idle(_is_held_back(rollout))

            return noted

        with ExitStack() as stack:
            for event in ("submitted", "accepted", "rejected"):
                name = f"on_rollout_{event}"
                manager = rollout.staleness_manager
                stack.enter_context(wrapped(manager, name, note_after))
            yield

    def _note_idle(self, is_idle: bool) -> None:
        with self._lock:
            now = self._clock()
            if self._idle_since is not None:
                self._idle_seconds += now - self._idle_since
            self._idle_since = now if is_idle else None

    def _take_idle_seconds(self) -> float:
        with self._lock:
            seconds, self._idle_seconds = self._idle_seconds, 0.0
            if self._idle_since is not None:
                now = self._clock()
                seconds += now - self._idle_since
                self._idle_since = now
        return seconds

    def _waits(self, reason: str) -> Callable[[Call], Call]:
        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                with self._waiting(reason):
                    return call(*args, **kwargs)

            return timed

        return wrap

    def _rollout_waits(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            idle_seconds = self._take_idle_seconds()  # while the trainer was busy
            before = self._seconds["rollout"]
            with self._waiting("rollout"):
                batch = call(*args, **kwargs)
            waited = self._seconds["rollout"] - before
            # Had rollouts not been held back, they would have been as much further.
            too_old = min(waited, idle_seconds)
            self._seconds["rollout"] -= too_old
            self._seconds["policy_too_old"] += too_old
            self._take_idle_seconds()
            return batch

        return timed

    @contextmanager
    def _waiting(self, reason: str) -> Iterator[None]:
        if self._is_waiting:
            yield
            return
        self._is_waiting, started = True, self._clock()
        try:
            yield
        finally:
            self._seconds[reason] += self._clock() - started
            self._is_waiting = False


def _is_held_back(rollout: Any) -> bool:
    """Whether no rollout runs, and the limit of staleness lets none start."""
    manager = rollout.staleness_manager
    stat = manager.rollout_stat
    # Not get_version(): its lock is held while workers are told a new version.
    num_batches = manager.max_staleness + rollout._version + 1
    num_allowed = num_batches * max(1, manager.consumer_batch_size)
    return bool(stat.running == 0 and stat.accepted >= num_allowed)
