"""What the collector and the plan tell reaches a step's record and the summary."""

from areal_dta.launch import _collector_summary
from areal_dta.report.step_metrics import step_metrics

STATS = {
    "collector/inserted": 16.0,
    "collector/share_of_step": 0.004,
    "collector/wait_share_of_step": 0.001,
    "collector/inserted__count": 1,
    "plan/imbalance": 1.02,
    "ppo_actor/task_reward/avg": 0.5,
}


def test_in_the_record_and_in_the_summary():
    record = step_metrics(1, STATS, None, 2.0)
    assert record.collector == {
        "collector/inserted": 16.0,
        "collector/share_of_step": 0.004,
        "collector/wait_share_of_step": 0.001,
        "plan/imbalance": 1.02,
    }
    summary = _collector_summary([record, record])
    assert "0.4% of a step" in summary and "0.1% waited" in summary
    assert "1.020x mean" in summary


def test_a_run_without_a_collector():
    assert step_metrics(1, {}, None, 2.0).collector == {}
    assert _collector_summary([step_metrics(1, {}, None, 2.0)]) == ""
