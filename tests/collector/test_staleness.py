"""Old results: trained as by AReaL alone, unless a limit is set."""

import asyncio
import threading

from tests.collector.rollouts import BATCH, Rollout, indices


class Clock:
    """Simulated time in steps."""

    def __init__(self):
        self.now = 0.0

    async def sleep(self, steps):
        end = self.now + steps
        while self.now < end:
            await asyncio.sleep(0.002)


def slow_prompts_trained(is_collected):
    """One prompt of 8 lasts 3.2 steps, the others 0.1; 64 are trained."""
    clock = Clock()

    async def wait(index):
        await clock.sleep(3.2 if index % 8 == 0 else 0.1)

    ended = threading.Event()

    def tick():  # slowly, so that whoever waits for a batch gets one
        while not ended.wait(0.2):
            clock.now += 0.1

    with Rollout(wait=wait, is_collected=is_collected) as rollout:
        ticking = threading.Thread(target=tick)
        ticking.start()
        trained = []
        try:
            for version in range(64 // BATCH):
                trained += indices(rollout.batch())
                clock.now += 1.0
                rollout.set_version(version + 1)
        finally:
            ended.set()
            ticking.join()
        if is_collected:
            metrics = rollout.collector.take_metrics(1.0)
            assert metrics["collector/dropped"] == 0
    assert len(trained) == 64
    return sum(index % 8 == 0 for index in trained)


def test_slow_rollouts_are_trained_as_by_areal_alone():
    """None of them was in 0.1.0: all were rejected as stale, and then given up."""
    stock, ours = slow_prompts_trained(False), slow_prompts_trained(True)
    assert stock > 0 and abs(stock - ours) <= 1


def test_results_that_became_stale_are_taken_back_and_run_again():
    with Rollout({2: "slow"}, staleness=1, max_staleness=1) as rollout:
        first = indices(rollout.batch())
        waits = rollout.controller._dispatcher._pending_results
        rollout.wait_until(lambda: len(waits) == BATCH)  # all that may run ahead
        ahead = [i for i in rollout.workers.prompts if i not in first][:BATCH]
        rollout.set_version(2)  # they were begun by version 0
        second = indices(rollout.batch())
        metrics = rollout.collector.take_metrics(1.0)
        assert metrics["collector/evicted_stale"] == BATCH
        for index in ahead:
            assert rollout.workers.prompts.count(index) == 2
        assert len(second) == BATCH
        stats = rollout.controller.staleness_manager.get_stats()
        assert stats.rejected in (BATCH, BATCH + 1)  # the slow one may have come
