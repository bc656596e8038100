"""Simulated users: what they say, and what happens when their server fails."""

import asyncio
import json
from importlib.util import find_spec

import pytest

from recipes.chat import ServerError

if not find_spec("tau2"):
    pytest.skip("needs the extra tau2", allow_module_level=True)

from recipes.tau2.api import STOP
from recipes.tau2.domains import find_domain, find_task, task_ids
from recipes.tau2.options import Tau2Options, UserOptions
from recipes.tau2.play.episode import run_episode, user_client, user_maker
from recipes.tau2.play.policies import RefusePolicy
from recipes.tau2.play.users import RuleUser, user_tools
from tests.recipes.stub_server import StubServer


def say(user, num):
    async def run():
        texts = []
        for _ in range(num):
            await user.prepare(None)
            message, _ = user.generate_next_message(None, None)
            texts.append(message.content)
        return texts

    return asyncio.run(run())


def test_a_rule_user_says_its_case_agrees_and_leaves():
    task = find_task("mock", "create_task_1")
    texts = say(RuleUser(task, 2), 3)
    assert texts[0] == task.user_scenario.instructions
    assert texts[1:] == ["Yes, please go ahead.", STOP]
    task = find_task("airline", task_ids("airline", "train")[0])
    texts = say(RuleUser(task, 3), 4)
    instructions = task.user_scenario.instructions
    assert texts[:2] == [instructions.reason_for_call, instructions.known_info]
    assert texts[3] == STOP


def play_with_model(domain_name, server_url, **options):
    domain = find_domain(domain_name)
    user = UserOptions(kind="llm", base_url=server_url, **options)
    task_id = task_ids(domain_name, "test")[0]

    async def run():
        client = user_client(domain, user)
        try:
            return await run_episode(
                domain,
                task_id,
                RefusePolicy(domain.solo),
                user_maker(domain, user, client),
                Tau2Options(),
            )
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_user_model_sees_the_scenario_and_roles_turned_around():
    with StubServer(lambda request: f"Bye. {STOP}") as server:
        episode = play_with_model("mock", server.url, model="u")
    (request,) = server.requests
    roles = [m["role"] for m in request["messages"]]
    assert roles == ["system", "user"]
    assert "Important Meeting" in request["messages"][0]["content"]
    assert request["messages"][1]["content"] == "Hi! How can I help you today?"
    assert "tools" not in request
    assert (episode.termination, episode.num_turns) == ("user_stop", 0)


def test_a_user_with_tools_calls_them():
    call = {
        "id": "u1",
        "type": "function",
        "function": {"name": "check_status_bar", "arguments": "{}"},
    }
    answers = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        f"It says so. {STOP}",
    ]
    with StubServer(lambda request: answers.pop(0)) as server:
        episode = play_with_model("telecom", server.url)
    names = {tool["function"]["name"] for tool in user_tools("telecom")}
    assert {t["function"]["name"] for t in server.requests[0]["tools"]} == names
    called, result = server.requests[1]["messages"][-2:]
    assert called["tool_calls"][0]["function"]["name"] == "check_status_bar"
    assert (result["role"], result["tool_call_id"]) == ("tool", "u1")
    assert [m.role for m in episode.messages] == ["assistant", "user", "tool", "user"]


def test_a_user_model_that_says_nothing_of_use():
    with StubServer(lambda request: "") as server:
        with pytest.raises(ServerError, match="3 useless replies in a row"):
            play_with_model("mock", server.url)
    assert len(server.requests) == 3


def test_a_user_server_that_is_down():
    with StubServer(lambda request: 503) as server:
        with pytest.raises(ServerError, match="the user model at .*tau2.user.base_url"):
            play_with_model("mock", server.url, max_retries=1)
    assert len(server.requests) == 2


def test_an_unreachable_user_server_is_found_before_anything_starts():
    pytest.importorskip("areal")
    from recipes.tau2.config import check_user_server

    with StubServer(lambda request: "Hi") as server:
        check_user_server(UserOptions(kind="llm", base_url=server.url))
        url = server.url
    with pytest.raises(ValueError, match=f"does not answer at {url}/models"):
        check_user_server(UserOptions(kind="llm", base_url=url))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"domain": "banking"}, "unknown tau2 domain 'banking'"),
        ({"max_steps": 0}, "tau2.max_steps=0; expected a positive"),
        (
            {"user": UserOptions(kind="robot"), "domain": "mock"},
            "tau2.user.kind='robot'",
        ),
        (
            {"user": UserOptions(kind="llm"), "domain": "mock"},
            "needs tau2.user.base_url",
        ),
        ({"user": UserOptions(kind="gold"), "domain": "mock"}, "only the gold policy"),
        ({"user": UserOptions(max_retries=-1)}, "max_retries=-1; expected >= 0"),
        ({"user": UserOptions(timeout_seconds=0)}, "timeout_seconds=0"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        Tau2Options(**{"domain": "mock", **options}).validate()


def test_a_solo_domain_needs_no_user():
    Tau2Options(domain="telecom_solo", user=UserOptions(kind="llm")).validate()
    json.dumps(task_ids("telecom_solo", "small"))
