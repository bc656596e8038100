"""Episodes in the real environments, with scripts in place of models."""

import asyncio
import threading
from importlib.util import find_spec

import pytest

from recipes.chat import ServerError
from recipes.replies import Call, assistant_message

if not find_spec("tau2"):
    pytest.skip("needs the extra tau2", allow_module_level=True)

from recipes.tau2.domains import find_domain, find_task, task_ids
from recipes.tau2.options import Tau2Options
from recipes.tau2.play import episode as episode_module
from recipes.tau2.play.episode import run_episode
from recipes.tau2.play.policies import GoldPolicy, GoldScript, RefusePolicy
from recipes.tau2.play.users import GoldUser, RuleUser
from recipes.tau2.workers.scoring import score

# What doing nothing reaches: (domain, split) -> successes, tasks.
FLOOR = {
    ("airline", "train"): (13, 30),
    ("airline", "test"): (6, 20),
    ("retail", "train"): (5, 74),
    ("retail", "test"): (2, 40),
    ("telecom_solo", "train"): (0, 74),
    ("telecom_solo", "test"): (0, 40),
}


POWER = assistant_message("", [Call("calculate", {"expression": "9**9**9"})])


class Says:
    """A policy that repeats its messages."""

    def __init__(self, *messages):
        self.messages = list(messages)
        self.seen = []

    async def reply(self, messages, tools):
        self.seen.append([dict(m) for m in messages])
        message = self.messages[min(len(self.seen), len(self.messages)) - 1]
        return message if isinstance(message, dict) else assistant_message(message)


def play(domain_name, task_id, policy, make_user=None, **limits):
    domain = find_domain(domain_name)
    if make_user is None and not domain.solo:
        make_user = lambda task: RuleUser(task, 3)  # noqa: E731
    return asyncio.run(
        run_episode(domain, task_id, policy, make_user, Tau2Options(**limits))
    )


def reward(episode):
    messages = [m.model_dump() for m in episode.messages]
    return score(episode.domain, episode.task_id, episode.termination, messages)


def play_gold(domain_name, task_id):
    script = GoldScript(find_task(domain_name, task_id))
    solo = find_domain(domain_name).solo
    make_user = None if solo else lambda task: GoldUser(script)
    return play(
        domain_name, task_id, GoldPolicy(script, solo), make_user, max_steps=300
    )


def play_refusal(domain_name, task_id):
    solo = find_domain(domain_name).solo
    make_user = None if solo else lambda task: RuleUser(task, 1)
    return play(domain_name, task_id, RefusePolicy(solo), make_user)


@pytest.mark.parametrize("domain", ["airline", "retail", "telecom", "telecom_solo"])
def test_the_reference_solution_scores_one(domain):
    for task_id in task_ids(domain, "test")[:2]:
        assert reward(play_gold(domain, task_id)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("domain, split", FLOOR)
def test_the_reference_solution_scores_one_on_every_task(domain, split):
    ids = task_ids(domain, split)
    assert len(ids) == FLOOR[domain, split][1]
    failed = [i for i in ids if reward(play_gold(domain, i)) != 1.0]
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize("domain, split", FLOOR)
def test_the_floor_of_doing_nothing(domain, split):
    rewards = [reward(play_refusal(domain, i)) for i in task_ids(domain, split)]
    assert (sum(rewards), len(rewards)) == FLOOR[domain, split]


def test_doing_nothing_fails_where_something_was_asked_for():
    assert reward(play_refusal("mock", "create_task_1")) == 0.0
    assert reward(play_refusal("mock", "create_task_1_nl_eval")) == 1.0
    solo = play_refusal("telecom_solo", task_ids("telecom_solo", "test")[0])
    assert (solo.termination, solo.num_turns) == ("agent_stop", 1)
    assert reward(solo) == 0.0


def test_every_usable_mock_task_can_be_judged():
    for task_id in task_ids("mock", "train"):
        assert reward(play_refusal("mock", task_id)) in (0.0, 1.0)


@pytest.mark.parametrize(
    "message, problem",
    [
        ("", "empty_message"),
        ("<tool_call>create_task()</tool_call>", "broken_tool_call"),
        (POWER, "unsafe_tool_call"),
    ],
)
def test_a_useless_reply_ends_the_episode(message, problem):
    episode = play("mock", "create_task_1", Says("Hello.", message))
    assert (episode.termination, episode.problem) == ("agent_error", problem)
    assert episode.num_turns == 2
    assert reward(episode) == 0.0


def test_a_useless_first_reply_of_a_solo_agent():
    task_id = task_ids("telecom_solo", "test")[0]
    episode = play("telecom_solo", task_id, Says(""))
    assert (episode.termination, episode.problem) == ("agent_error", "empty_message")
    assert reward(episode) == 0.0


def test_words_from_a_solo_agent():
    task_id = task_ids("telecom_solo", "test")[0]
    episode = play("telecom_solo", task_id, Says("Hello?"))
    assert (episode.termination, episode.problem) == ("agent_error", None)


def test_an_endless_loop_ends():
    loop = assistant_message("", [Call("get_users", {})])
    episode = play("mock", "create_task_1", Says(loop), max_steps=20)
    assert episode.termination == "max_steps"
    assert 9 <= episode.num_turns <= 11
    assert reward(episode) == 0.0


def test_too_many_failed_calls_end_it():
    bad = assistant_message("", [Call("no_such_tool", {"requestor": "x"})])
    episode = play("mock", "create_task_1", Says(bad), max_errors=3)
    assert (episode.termination, episode.num_tool_errors) == ("too_many_errors", 3)
    assert reward(episode) == 0.0


def test_the_history_keeps_what_was_written():
    call = '<tool_call>\n{"name": "get_users",  "arguments": {}}\n</tool_call>'
    policy = Says(f"<think>\nhm\n</think>\n\n{call}", "Done.")
    episode = play("mock", "create_task_1", policy)
    first, second, third = policy.seen[:3]
    assert second[: len(first)] == first and third[: len(second)] == second
    assert second[len(first)] == assistant_message(policy.messages[0])
    result = second[-1]
    assert result["role"] == "tool" and "user_1" in result["content"]
    assert [m["role"] for m in first] == ["system", "assistant", "user"]
    # tau2 gets neither thoughts nor markup
    assert episode.messages[2].tool_calls[0].name == "get_users"
    assert episode.messages[2].content is None


def test_several_calls_in_one_message():
    both = assistant_message(
        "", [Call("get_users", {}, "a"), Call("get_users", {}, "b")]
    )
    policy = Says(both, "Done.")
    episode = play("mock", "create_task_1", policy)
    results = [m for m in policy.seen[1] if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in results] == ["a", "b"]
    assert reward(episode) == 0.0  # and the evaluator can replay it


def test_an_episode_that_takes_too_long_is_an_error():
    class Sleeps:
        async def reply(self, messages, tools):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError, match="took more than 0.2 s"):
        play("mock", "create_task_1", Sleeps(), episode_timeout_seconds=0.2)


def test_a_failing_server_is_not_the_agents_error():
    class Down:
        async def reply(self, messages, tools):
            raise ServerError("gone")

    with pytest.raises(ServerError, match="gone"):
        play("mock", "create_task_1", Down())


def test_building_and_stepping_happen_off_the_loop(monkeypatch):
    seen = {"build": set(), "step": set()}

    def noted(name, function):
        def call(*args):
            seen[name].add(threading.current_thread().name)
            return function(*args)

        return call

    for name, target, attribute in (
        ("build", episode_module, "build_environment"),
        ("step", episode_module.Orchestrator, "step"),
    ):
        monkeypatch.setattr(target, attribute, noted(name, getattr(target, attribute)))
    play("mock", "create_task_1", Says("Hello."))
    for names in seen.values():
        assert names and all(name.startswith("tau2") for name in names)
