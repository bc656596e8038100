"""The agent workflow, its data set and filter, against a stub in AReaL's place."""

import asyncio
from importlib.util import find_spec

import httpx
import pytest
import torch

if not find_spec("tau2"):
    pytest.skip("needs the extra tau2", allow_module_level=True)

from areal.api.cli_args import GenerationHyperparameters

from areal_dta.embedded import tiny_model_path
from recipes.tau2 import group_filter
from recipes.tau2 import workflow as workflow_module
from recipes.tau2.dataset import load_dataset
from recipes.tau2.options import Tau2Options, UserOptions
from recipes.tau2.workers.rewards import RewardPool
from recipes.tau2.workflow import Tau2Workflow, workflow_kwargs
from tests.recipes.stub_server import StubServer

MAKE = (
    '<tool_call>{"name": "create_task", "arguments": '
    '{"user_id": "user_1", "title": "Important Meeting"}}</tool_call>'
)
ROW = {"domain": "mock", "task_id": "create_task_1"}


@pytest.fixture(scope="module")
def pool():
    with RewardPool(1) as pool:
        yield pool


@pytest.fixture
def recorded(pool, monkeypatch):
    """What is logged of each episode."""
    seen = []
    monkeypatch.setattr(workflow_module, "_rewards", lambda *options: pool)
    monkeypatch.setattr(
        workflow_module,
        "_record",
        lambda *args: seen.append(workflow_module.episode_statistics(*args)),
    )
    return seen


def options(**changes):
    return Tau2Options(
        **{"domain": "mock", "user": UserOptions(kind="rule"), **changes}
    )


def run(server, row=ROW, **changes):
    gconfig = GenerationHyperparameters(max_new_tokens=9, temperature=0.7)
    workflow = Tau2Workflow(**workflow_kwargs(options(**changes), gconfig, False))

    async def play():
        async with httpx.AsyncClient() as http_client:
            return await workflow.run(
                row, base_url=server.url, api_key="k", http_client=http_client
            )

    return asyncio.run(play())


def test_an_episode_gives_its_reward_and_is_logged(recorded):
    answers = [MAKE, "It is done."]
    with StubServer(lambda r: answers.pop(0) if len(answers) > 1 else answers[0]) as s:
        assert run(s) == 1.0
    (stats,) = recorded
    assert stats["tau2/end/user_stop"] == 1.0
    assert stats["tau2/turns"] == len(s.requests) == 4.0
    assert stats["tau2/reward_error"] == 0.0
    first = s.requests[0]
    assert (first["temperature"], first["max_tokens"]) == (0.7, 9)
    # the proxy shall return the text as it was written, and think as told
    assert first["tool_choice"] == "none"
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    # each call's conversation begins with the one before it
    for before, after in zip(s.requests, s.requests[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]


@pytest.mark.parametrize(
    "text, problem",
    [("<tool_call>{</tool_call>", "broken_tool_call"), ("", "empty_message")],
)
def test_a_useless_reply_is_counted_and_gives_zero(recorded, text, problem):
    with StubServer(lambda request: text) as server:
        assert run(server) == 0.0
    (stats,) = recorded
    assert stats[f"tau2/problem/{problem}"] == 1.0
    assert stats["tau2/end/agent_error"] == 1.0


def test_a_full_context_ends_the_episode(recorded):
    body = b'{"detail": "len of prompt tokens 9 exceeds max_total_tokens 8"}'
    answers = ["Hello.", body]
    with StubServer(lambda request: answers.pop(0)) as server:
        assert run(server) == 0.0
    assert recorded[0]["tau2/problem/context_full"] == 1.0


def test_every_episode_logs_the_same_keys(recorded):
    for text in ("", "Hello."):
        with StubServer(lambda request, text=text: text) as server:
            run(server)
    assert recorded[0].keys() == recorded[1].keys()


def test_the_data_set_of_a_split():
    rows = load_dataset("telecom_solo", "test")
    assert len(rows) == 40 and set(rows.column_names) == {"domain", "task_id"}
    assert len(load_dataset("mock", "train", repeat=3)) == 24
    only = load_dataset("mock", tasks=["update_task_1"])
    assert only.to_list() == [{"domain": "mock", "task_id": "update_task_1"}]
    shuffled = load_dataset("telecom_solo", "test", seed=1)
    assert sorted(shuffled["task_id"]) == sorted(rows["task_id"])
    assert shuffled["task_id"] != rows["task_id"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("banking",), "is no tau2 domain; expected one of airline"),
        (("airline", "dev"), "no split 'dev'; expected one of train"),
    ],
)
def test_a_data_set_that_does_not_exist(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(*arguments)


def test_an_unknown_task():
    with pytest.raises(ValueError, match="has no usable task nope; it has create"):
        load_dataset("mock", tasks=["nope"])


def test_prompts_that_do_not_fit_are_refused():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    load_dataset("mock", tokenizer=tokenizer, max_length=600)
    with pytest.raises(ValueError, match="tokens, more than max_length=2,048"):
        load_dataset("airline", tokenizer=tokenizer, max_length=2048)


def rewards(*values):
    return {"rewards": torch.tensor(values, dtype=torch.float32)}


def test_groups_with_equal_outcomes_are_dropped(monkeypatch):
    monkeypatch.setattr(group_filter, "_num_dropped", 0)
    keep = group_filter.has_different_rewards
    assert keep(rewards(0, 0, 1, 1))
    assert not keep(rewards(0, 0, 0))
    assert not keep(rewards(1, 1))
    # a turn discount makes rows of one outcome differ
    assert not keep(rewards(0.81, 0.9, 1.0, 0.9, 1.0))
    assert keep(rewards(0.9, 1.0, 0.0))


def test_the_filter_lets_one_through_before_the_run_stands_still(monkeypatch):
    monkeypatch.setattr(group_filter, "_num_dropped", 0)
    monkeypatch.setattr(group_filter, "MAX_DROPPED_IN_A_ROW", 3)
    kept = [group_filter.has_different_rewards(rewards(0, 0)) for _ in range(8)]
    assert kept == [False, False, False, True] * 2
