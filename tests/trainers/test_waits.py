"""Where a trainer waits: with a clock that only fakes of AReaL's controllers move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from areal.infra.staleness_manager import StalenessManager

from areal_dta.trainers.waits import WaitMeter

BATCH = 2


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rollout:
    """Controller whose rollouts take a while, with AReaL's own staleness control."""

    def __init__(self, clock: Clock, max_staleness: int) -> None:
        self.clock, self._version = clock, 0
        self.staleness_manager = StalenessManager(
            version_provider=SimpleNamespace(get_version=lambda: self._version),
            max_concurrent_rollouts=8,
            consumer_batch_size=BATCH,
            max_staleness=max_staleness,
        )

    def submit(self) -> int:
        """Start what the staleness control allows."""
        num = max(0, self.staleness_manager.get_capacity())
        for _ in range(num):
            self.staleness_manager.on_rollout_enqueued()
            self.staleness_manager.on_rollout_submitted()
        return num

    def finish(self, num: int) -> None:
        for _ in range(num):
            self.staleness_manager.on_rollout_accepted()

    def prepare_batch(self, seconds: float, num: int = 0) -> str:
        self.clock.now += seconds
        self.finish(num)
        return "batch"


class Trained:
    """Training controller; a weight update is a call of the workers, as in AReaL."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def _custom_function_call(self, seconds: float) -> str:
        self.clock.now += seconds
        return "done"

    def update_weights(self, seconds: float) -> None:
        self.clock.now += 0.5
        self._custom_function_call(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_reasons_add_up_to_the_step(clock: Clock) -> None:
    rollout, actor, critic = Rollout(clock, 1), Trained(clock), Trained(clock)
    meter = WaitMeter(clock)
    with meter.watch(rollout, actor, critic, None):
        rollout.submit()
        started = clock.now
        assert rollout.prepare_batch(4.0) == "batch"
        assert actor._custom_function_call(2.0) == "done"
        critic._custom_function_call(1.0)
        clock.now += 0.25 + 0.125  # the trainer's own work, and the plan
        actor.update_weights(3.0)
        waits = meter.take_metrics(plan_seconds=0.125)
    assert waits == {
        "wait/rollout": 4.0,
        "wait/policy_too_old": 0.0,
        "wait/plan": 0.125,
        "wait/workers": 3.0,
        "wait/weights": 3.5,
    }
    assert sum(waits.values()) == clock.now - started - 0.25
    assert sum(meter.take_metrics().values()) == 0.0  # taken


@pytest.mark.parametrize(("trained", "too_old"), [(3.0, 3.0), (9.0, 5.0)])
def test_synchronous_rollouts_wait_for_the_policy(
    clock: Clock, trained: float, too_old: float
) -> None:
    """Without staleness, a step's rollouts cannot run while the last one trains.

    What that costs is the shorter of training and the wait.
    """
    rollout, actor = Rollout(clock, 0), Trained(clock)
    meter = WaitMeter(clock)
    with meter.watch(rollout, actor):
        assert rollout.submit() == BATCH
        rollout.prepare_batch(5.0, BATCH)
        assert meter.take_metrics()["wait/policy_too_old"] == 0.0
        assert rollout.submit() == 0
        actor._custom_function_call(trained)
        rollout._version = 1
        assert rollout.submit() == BATCH
        rollout.prepare_batch(5.0, BATCH)
        waits = meter.take_metrics()
    assert waits["wait/policy_too_old"] == too_old
    assert waits["wait/rollout"] == 5.0 - too_old


def test_asynchronous_rollouts_run_while_the_trainer_works(clock: Clock) -> None:
    rollout, actor = Rollout(clock, 1), Trained(clock)
    meter = WaitMeter(clock)
    with meter.watch(rollout, actor):
        assert rollout.submit() == 2 * BATCH
        rollout.prepare_batch(5.0, BATCH)  # the other batch still runs
        actor._custom_function_call(9.0)
        rollout.prepare_batch(1.0, BATCH)
        waits = meter.take_metrics()
    assert (waits["wait/rollout"], waits["wait/policy_too_old"]) == (6.0, 0.0)


def test_nothing_is_left_behind(clock: Clock) -> None:
    rollout, actor = Rollout(clock, 0), Trained(clock)
    before = [dict(vars(x)) for x in (rollout, actor, rollout.staleness_manager)]
    meter = WaitMeter(clock)

    def fail(*args: Any) -> None:
        raise OSError("gone")

    actor.update_weights = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="gone"), meter.watch(rollout, actor):
        actor.update_weights(1.0)
    vars(actor).pop("update_weights", None)
    found = [dict(vars(x)) for x in (rollout, actor, rollout.staleness_manager)]
    assert found == before
    with meter.watch(rollout, actor):  # and the meter goes on
        actor._custom_function_call(1.0)
    assert meter.take_metrics()["wait/workers"] == 1.0
