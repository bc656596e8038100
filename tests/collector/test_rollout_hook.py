"""Results on their way through AReaL's controller, dispatcher and staleness control."""

import inspect
import threading
import time

import pytest
from areal.infra.rpc.rtensor import HttpRTensorBackend, RTensor

from areal_dta.collector.prompt_issuer import MAX_TRIES
from areal_dta.collector.rejections import TooManyRejected
from tests.collector.rollouts import BATCH, Rollout, indices, prompt_loader
from tests.engine.dispatch_scenarios import make_items


def test_a_batch_comes_in_the_order_of_issue_with_its_plan():
    with Rollout() as rollout:
        seen = []
        for version in range(3):
            batch = rollout.batch()
            found = indices(batch)
            assert found == sorted(found) and len(found) == BATCH
            plan = batch.plan(rollout.planner, 2, 1)
            owners = {o for r in range(2) for o in plan.rows(r, 0)}
            assert owners == {(i, row) for i in range(BATCH) for row in range(3)}
            tokens = sum(int(item["attention_mask"].sum()) for item in batch)
            assert batch.sequences.stats.num_sequence_tokens == tokens
            seen += found
            rollout.set_version(version + 1)
        assert len(set(seen)) == len(seen)
        metrics = rollout.collector.take_metrics(10.0)
        assert metrics["collector/inserted"] >= 12
        assert metrics["collector/plan_seconds"] > 0


def test_what_became_of_each_prompt_is_saved():
    fates = {1: "filtered", 2: "nan", 3: "unreachable once", 5: "images"}
    with Rollout(fates) as rollout:
        trained = []
        for version in range(4):
            trained += indices(rollout.batch())
            rollout.set_version(version + 1)
        assert not {1, 2, 5} & set(trained)
        # its worker did not answer: it was tried again
        assert rollout.workers.prompts.count(3) == 2 and 3 in trained
        state = rollout.loader.state_dict()
        finished = set(range(state["next"])) - set(state["unsettled"])
        assert finished == {1, 2, 5, *trained}
        stats = rollout.controller.staleness_manager.get_stats
        assert stats().rejected == 4

        def balanced():  # AReaL counts a result just before it is taken in
            num_waiting = len(rollout.collector.waiting_task_ids)
            return stats().accepted == num_waiting + len(trained)

        rollout.wait_until(balanced)
        metrics = rollout.collector.take_metrics(1.0)
        assert metrics["collector/rejected/nan"] == 1
        assert metrics["collector/rejected/images"] == 1
        assert metrics["collector/rejected/filtered"] == 1
        assert metrics["collector/rejected/failed"] == 1


def test_a_restart_issues_once_more_what_was_not_trained():
    with Rollout({2: "slow"}, loader=prompt_loader()) as rollout:
        trained = indices(rollout.batch())
        state = rollout.loader.state_dict()
    assert state["next"] > BATCH
    loader = prompt_loader()
    loader.load_state_dict(state)
    with Rollout(loader=loader) as rollout:
        for version in range(2):
            trained += indices(rollout.batch())
            rollout.set_version(version + 1)
    assert sorted(trained) == list(range(12))  # an epoch: none lost, none twice


@pytest.fixture
def quick_retries(monkeypatch):
    """Three attempts as AReaL makes them, without the seconds between them."""
    backend = HttpRTensorBackend
    for repaired in (backend._fetch_tensor, backend._fetch_shard_group):
        fetch = inspect.unwrap(repaired)  # in a process that had an engine
        assert fetch.__defaults__ == (3, 1.0)
        monkeypatch.setattr(fetch, "__defaults__", (3, 0.01))


def test_unfetchable_tensors_cost_a_result_and_not_the_run(quick_retries):
    """0.1.0 never gave the place in AReaL's capacity back, and waited for ever."""
    fates = {index: "lost once" for index in range(5)}
    with Rollout(fates) as rollout:
        trained = []
        for version in range(100):
            trained += indices(rollout.batch())
            rollout.set_version(version + 1)
            if set(range(5)) <= set(trained):  # put back, and trained
                break
            time.sleep(0.01)
        assert set(range(5)) <= set(trained)
        metrics = rollout.collector.take_metrics(1.0)
        assert metrics["collector/rejected/failed"] == 5
        stats = rollout.controller.staleness_manager.get_stats
        assert stats().rejected == 5

        def balanced():
            num_waiting = len(rollout.collector.waiting_task_ids)
            return stats().accepted == num_waiting + len(trained)

        rollout.wait_until(balanced)


@pytest.mark.parametrize("fate", ["filtered", "lost", "unreachable"])
def test_a_workflow_without_results_stops_with_the_reasons(fate, quick_retries):
    """0.1.0 waited for ever."""
    fates = {index: fate for index in range(100)}
    with Rollout(fates, max_batches_without_result=3) as rollout:
        with pytest.raises(TooManyRejected, match="none of the last 1[2-9] results"):
            rollout.batch()


def test_too_many_bad_trajectories_stop_the_run_with_the_reasons():
    fates = {index: "nan" for index in range(100) if index % 4}
    with Rollout(fates) as rollout:
        with pytest.raises(TooManyRejected, match="nan.*rewards holds NaN"):
            for version in range(4):
                rollout.batch()
                rollout.set_version(version + 1)


def test_results_of_a_caller_of_its_own_are_not_collected():
    """They stayed in the forest for ever in 0.1.0."""
    with Rollout() as rollout:
        data = [{"index": 50 + i} for i in range(3)]
        results = rollout.controller.rollout_batch(data, workflow="any", group_size=3)
        assert sorted(indices(results)) == [50, 51, 52]
        assert rollout.collector.total.num_sequences == 0
        assert len(rollout.batch()) == BATCH


def test_a_result_that_somebody_submitted_may_end_up_in_a_batch():
    with Rollout() as rollout:
        rollout.controller.submit({"index": 50}, "any", group_size=3)
        rollout.wait_until(lambda: len(rollout.controller.dispatcher._pending_results))
        batch = rollout.batch()
        assert indices(batch)[-1] == 50 and len(batch) == BATCH
        plan = batch.plan(rollout.planner, 2, 1)
        assert len({o for r in range(2) for o in plan.rows(r, 0)}) == 3 * BATCH


def test_a_slow_fetch_keeps_no_other_result_waiting(monkeypatch):
    """0.1.0 had one thread for all."""
    go_on, slow = threading.Event(), []
    stock = RTensor.localize

    def localize(items):
        if int(items[0]["input_ids"].sum()) in slow:
            assert go_on.wait(timeout=30)
        return stock(items)

    (item,) = make_items((3,), seed=0)
    slow.append(int(item["input_ids"].sum()))
    monkeypatch.setattr(RTensor, "localize", localize)
    with Rollout() as rollout:
        first = indices(rollout.batch())
        assert 0 not in first and len(first) == BATCH
        go_on.set()
        rollout.set_version(1)
        assert 0 in indices(rollout.batch())


def test_dynamic_batches():
    fates = {i: "filtered" for i in (0, 1, 2, 3, 5)}
    with Rollout(fates) as rollout:
        batch = rollout.batch(dynamic_bs=True)
        # the first four attempts may all be rejected: then the next batch is taken
        assert 1 <= len(batch) <= BATCH
        assert not set(fates) & set(indices(batch))
        assert batch.sequences.order.num_sequence_tokens > 0


def test_a_prompt_that_never_works_is_given_up():
    with Rollout({0: "unreachable"}) as rollout:
        for version in range(3):
            rollout.batch()
            rollout.set_version(version + 1)
        assert rollout.workers.prompts.count(0) == MAX_TRIES
        state = rollout.loader.state_dict()
        assert 0 not in state["unsettled"]
