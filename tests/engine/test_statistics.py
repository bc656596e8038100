"""Scalars of many loss calls become what one call would have logged."""

import pytest
import torch
import torch.distributed as dist
from areal.utils import stats_tracker
from areal.utils.stats_tracker import DistributedStatsTracker, ReduceType

from areal_dta.engine.statistics import (
    LossStatistics,
    TrainingWork,
    derive_ratios,
    record_expert_load,
)

CPU = torch.device("cpu")


@pytest.fixture
def tracker():
    return DistributedStatsTracker()


def test_scalars_are_combined_by_what_they_are(tracker):
    statistics = LossStatistics(tracker)
    for weight, values in (
        (3.0, {"fraction": 0.5, "x_max": 4.0, "x_min": 1.0, "n_x": 2.0}),
        (1.0, {"fraction": 0.1, "x_max": 9.0, "x_min": 0.5, "n_x": 5.0}),
    ):
        with statistics.call(0, weight):
            tracker.scalar(**values)
    statistics.flush()
    exported = tracker.export()
    assert exported["fraction"] == pytest.approx((3 * 0.5 + 1 * 0.1) / 4)
    assert (exported["x_max"], exported["x_min"], exported["n_x"]) == (9, 0.5, 7)
    assert exported["fraction__count"] == 1


def test_averages_beside_a_token_count_are_weighted_by_it(tracker):
    statistics = LossStatistics(tracker)
    for count, average in ((1, 3.0), (9, 1.0)):
        with statistics.call(0, 100.0), tracker.scope("version_stats"):
            tracker.scalar(sample_staleness_avg=average, n_valid_generated_tokens=count)
    statistics.flush()
    average = tracker.export()["version_stats/sample_staleness_avg"]
    assert average == pytest.approx((1 * 3 + 9 * 1) / 10)


def test_each_micro_batch_logs_once(tracker):
    statistics = LossStatistics(tracker)
    for micro_batch, value in ((1, 2.0), (0, 4.0), (1, 6.0)):
        with statistics.call(micro_batch, 1.0):
            tracker.scalar(value=value)
    tracker.scalar(value=1.0)  # logged by someone else: left alone
    statistics.flush()
    assert tracker.stats["value"] == [1.0, 4.0, 4.0]


def test_a_call_without_weight_does_not_count(tracker):
    statistics = LossStatistics(tracker)
    for weight, value in ((0.0, 100.0), (2.0, 1.0)):
        with statistics.call(0, weight):
            tracker.scalar(fraction=value)
    statistics.flush()
    assert tracker.export()["fraction"] == 1.0


def test_a_silent_call_leaves_keys_and_counts_nothing(tracker):
    def log(values):
        tracker.denominator(n=torch.tensor([True, True]))
        tracker.stat(x=torch.tensor(values), denominator="n")
        tracker.scalar(s=7.0)

    statistics = LossStatistics(tracker)
    with statistics.silent_call():
        log([100.0, -100.0])
    assert {"n", "x"} == set(tracker.stats)
    assert tracker.reduce_types["x"] is ReduceType.AVG_MIN_MAX
    log([1.0, 3.0])
    exported = tracker.export()
    assert exported == {
        "n": 2.0,
        "x/avg": 2.0,
        "x/min": 1.0,
        "x/max": 3.0,
        "s": 7.0,
        "s__count": 1,
    }


def log_tokens(tracker, values, num_valid):
    mask = torch.arange(len(values)) < num_valid
    tracker.denominator(n_tokens=torch.ones(len(values), dtype=torch.bool), n=mask)
    tracker.stat(x=torch.tensor(values), denominator="n")


def test_token_statistics_of_many_calls_are_those_of_one(tracker):
    statistics, whole = LossStatistics(tracker), DistributedStatsTracker()
    parts = [([1.0, 5.0], 1), ([2.0], 1), ([-3.0, 4.0, 9.0], 2)]
    for values, num_valid in parts:
        with statistics.call(0, 1.0):
            log_tokens(tracker, values, num_valid)
    assert not tracker.stats  # nothing is logged before all calls have been made
    statistics.flush()
    assert [len(values) for values in tracker.stats.values()] == [1, 1, 1]
    whole.denominator(
        n_tokens=torch.ones(6, dtype=torch.bool),
        n=torch.tensor([True, False, True, True, True, False]),
    )
    whole.stat(x=torch.tensor([1.0, 5.0, 2.0, -3.0, 4.0, 9.0]), denominator="n")
    assert tracker.export() == whole.export()


def test_the_tracker_never_sees_more_than_one_call_at_a_time(tracker):
    """Its checks walk over all earlier tensors: 4,000 calls took it minutes."""
    statistics, num_seen = LossStatistics(tracker), []
    for _ in range(100):
        with statistics.call(0, 1.0):
            num_seen.append(sum(map(len, tracker.stats.values())))
            log_tokens(tracker, [1.0, 2.0], 2)
    statistics.flush()
    assert max(num_seen) == 0
    assert tracker.export()["n"] == 200


def test_discarded_calls_leave_nothing(tracker):
    statistics = LossStatistics(tracker)
    with statistics.call(0, 1.0):
        log_tokens(tracker, [100.0], 1)
        tracker.scalar(s=100.0)
    statistics.discard()
    with statistics.call(0, 1.0):
        log_tokens(tracker, [1.0], 1)
        tracker.scalar(s=1.0)
    statistics.flush()
    exported = tracker.export()
    assert (exported["x/avg"], exported["s"], exported["n"]) == (1.0, 1.0, 1.0)


def test_a_failing_call_leaves_the_tracker_as_it_was(tracker):
    tracker.scalar(s=1.0)
    with pytest.raises(ZeroDivisionError):
        with LossStatistics(tracker).call(0, 1.0):
            tracker.scalar(s=2.0)
            1 / 0  # noqa: B018
    assert tracker.stats == {"s": [1.0]}


def test_work_adds_up_and_ratios_follow():
    for loss in (2.0, 4.0):
        TrainingWork(30, 10, 12, 3, 600.0, 200.0, loss).record(True, CPU)
    TrainingWork(0, 0, 0, 0, 0.0, 0.0, 1.0).record(False, CPU)
    stats = derive_ratios(stats_tracker.export_all())
    assert stats == {
        "dta/sequence_tokens": 60.0,
        "dta/tree_tokens": 20.0,
        "dta/computed_tokens": 24.0,
        "dta/num_blocks": 6.0,
        "dta/loss": 3.5,
        "dta/sharing_ratio": 3.0,
        "dta/predicted_saving": 3.0,
    }


def test_an_export_without_training_is_left_alone():
    assert derive_ratios({"reward": 1.0}) == {"reward": 1.0}


def test_expert_load_by_hand(world):
    group = dist.distributed_c10d._get_default_group()
    record_expert_load([[6, 2, 0, 0], [1, 1, 1, 1]], group)
    exported = stats_tracker.export_all()
    key = "dta/expert_load_max_over_mean"
    assert exported[f"{key}/layer_0"] == pytest.approx(6 / 2)
    assert exported[f"{key}/layer_1"] == pytest.approx(1.0)
    assert exported[key] == pytest.approx((3.0 + 1.0) / 2)
