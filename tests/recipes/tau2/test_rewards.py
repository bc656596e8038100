"""The evaluator in its own processes, against recorded rewards and against failures."""

import asyncio
import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("tau2"):
    pytest.skip("needs the extra tau2", allow_module_level=True)

from recipes.tau2.api import EvaluationType, SimulationRun, evaluate_simulation
from recipes.tau2.domains import find_domain, find_task
from recipes.tau2.recorded.trajectories import read_trajectories
from recipes.tau2.workers.rewards import RewardPool
from recipes.tau2.workers.scoring import score

TRAJECTORIES = Path(__file__).parents[3] / "../shared/data/tau2/trajectories.jsonl"
needs_data = pytest.mark.skipif(
    not TRAJECTORIES.exists(), reason="needs the shared data"
)

GREETING = {"role": "assistant", "content": "Hi! How can I help you today?"}
STOP = {"role": "user", "content": "###STOP###"}


def request_of(trajectory):
    row = json.loads(TRAJECTORIES.read_text().splitlines()[trajectory.episode])
    return {
        "domain": trajectory.domain,
        "task_id": trajectory.task_id,
        "termination": row["termination"],
        "messages": list(trajectory.messages),
    }


@pytest.fixture(scope="module")
def started():
    with RewardPool(1) as pool:
        yield pool


@pytest.fixture
def pool(started):
    started.counts.clear()
    return started


def judge(pool, requests):
    async def run():
        return await asyncio.gather(*map(pool.score, requests))

    return asyncio.run(run())


def mock(task_id="create_task_1", messages=(GREETING, STOP)):
    return {
        "domain": "mock",
        "task_id": task_id,
        "termination": "user_stop",
        "messages": list(messages),
    }


@needs_data
def test_a_sample_of_the_recorded_rewards_comes_out_again(pool):
    trajectories = read_trajectories(TRAJECTORIES)
    by_domain = {}
    for trajectory in trajectories:
        by_domain.setdefault((trajectory.domain, trajectory.reward), trajectory)
    chosen = list(by_domain.values())
    rewards = judge(pool, [request_of(t) for t in chosen])
    assert [r.value for r in rewards] == [t.reward for t in chosen]
    assert pool.counts == {"ok": len(chosen)}


@needs_data
@pytest.mark.slow
def test_every_recorded_reward_comes_out_again(pool):
    trajectories = read_trajectories(TRAJECTORIES)
    rewards = judge(pool, [request_of(t) for t in trajectories])
    assert [r.value for r in rewards] == [t.reward for t in trajectories]
    assert pool.counts == {"ok": len(trajectories)}


@needs_data
def test_kept_gold_hashes_change_no_reward():
    trajectories = [t for t in read_trajectories(TRAJECTORIES) if t.domain == "retail"]
    task_id = trajectories[0].task_id
    same = [t for t in trajectories if t.task_id == task_id][:3]
    task = find_task("retail", task_id)
    for trajectory in same:
        request = request_of(trajectory)
        mine = score(*request.values())
        simulation = SimulationRun(
            id="",
            task_id=task_id,
            start_time="",
            end_time="",
            duration=0.0,
            termination_reason=request["termination"],
            messages=request["messages"],
        )
        tau2s = evaluate_simulation(
            simulation,
            task,
            EvaluationType.ALL,
            find_domain("retail").solo,
            "retail",
        )
        assert mine == tau2s.reward == trajectory.reward


def test_an_exception_is_counted_and_gives_zero(pool):
    # tau2's evaluator raises on this task unless the agent has made the new task.
    requests = [mock("create_task_1_with_env_assertions"), mock()]
    failed, fine = judge(pool, requests)
    assert failed.value == 0.0 and failed.error.startswith("exception: ValueError")
    assert (fine.value, fine.error) == (0.0, None)
    assert pool.counts == {"exception": 1, "ok": 1}


def test_nothing_is_evaluated_in_this_process(pool, monkeypatch):
    import recipes.tau2.workers.scoring as scoring

    def here(*args):
        raise AssertionError("evaluated on the spot")

    monkeypatch.setattr(scoring, "evaluate_simulation", here)
    with pytest.raises(AssertionError):
        score(*mock().values())
    (reward,) = judge(pool, [mock()])
    assert reward.error is None


def test_messages_that_do_not_fit_together_are_counted(pool):
    stray = {"role": "tool", "id": "1", "content": "x", "requestor": "assistant"}
    (reward,) = judge(pool, [mock(messages=(GREETING, stray, STOP))])
    assert reward.value == 0.0 and "Tool message not expected" in reward.error
    assert pool.counts == {"exception": 1}


def test_a_time_out_ends_the_process_and_the_next_is_fresh(pool, monkeypatch):
    call = {"id": "1", "name": "calculate", "arguments": {"expression": "9**9**9"}}
    slow = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "id": "1", "content": "x", "requestor": "assistant"}
    endless = {
        "domain": "airline",
        "task_id": "0",
        "termination": "user_stop",
        "messages": [GREETING, slow, result, STOP],
    }
    monkeypatch.setattr(pool, "_timeout_seconds", 3.0)
    late, fine = judge(pool, [endless, mock()])
    assert late.value == 0.0 and late.error.startswith("timeout: ")
    assert fine.error is None
    assert pool.counts == {"timeout": 1, "ok": 1}


def test_a_killed_process_is_counted_and_replaced_and_none_is_left(pool):
    (first,) = judge(pool, [mock()])
    os.kill(pool._processes[0]._process.pid, 9)
    (second,) = judge(pool, [mock()])
    (third,) = judge(pool, [mock()])
    assert first.error is None and third.error is None
    assert second.value == 0.0 and second.error.startswith("crash: ")
    assert pool.counts == {"ok": 2, "crash": 1}
    process = pool._processes[0]._process
    pool.close()
    assert process.poll() is not None


def test_a_pool_needs_a_process():
    with pytest.raises(ValueError, match="num_processes=0"):
        RewardPool(0)
