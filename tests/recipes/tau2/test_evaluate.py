"""The evaluation command: pass^k, the floor, and its exit codes."""

import json
from importlib.util import find_spec

import pytest

from recipes.tau2.evaluate import main

if not find_spec("tau2"):
    pytest.skip("needs the extra tau2", allow_module_level=True)

from recipes.tau2.domains import find_domain
from recipes.tau2.evaluation import Settings, report
from recipes.tau2.options import Tau2Options
from recipes.tau2.play.episode import Episode
from recipes.tau2.workers.rewards import Reward
from tests.recipes.stub_server import StubServer

MAKE = (
    '<tool_call>{"name": "create_task", "arguments": '
    '{"user_id": "user_1", "title": "Important Meeting"}}</tool_call>'
)


def played(task_id, reward):
    return Episode("mock", task_id, "user_stop", None, 2, 0, ()), Reward(reward)


def test_pass_hat_k():
    settings = Settings(
        domain=find_domain("mock"),
        task_ids=("a", "b"),
        policy="refuse",
        options=Tau2Options(domain="mock"),
        trials=3,
    )
    outcomes = [played("a", r) for r in (1, 1, 0)] + [played("b", r) for r in (1, 1, 1)]
    made = report(settings, outcomes, [played("a", 0.0), played("b", 1.0)])
    # C(2, k) / C(3, k) and 1
    assert made.pass_hat == pytest.approx({1: 5 / 6, 2: 2 / 3, 3: 1 / 2})
    assert made.floor == 0.5
    assert made.terminations == {"user_stop": 6}


def test_the_reference_solution(tmp_path, capsys):
    file = tmp_path / "report.json"
    arguments = "--domain mock --policy gold --max-tasks 3 --reward-processes 1"
    assert main([*arguments.split(), "--json", str(file)]) == 0
    made = json.loads(file.read_text())
    assert made["pass_hat"] == {"1": 1.0}
    assert made["floor"] == pytest.approx(1 / 3)  # one asks for a compliment only
    assert "do-nothing floor" in " ".join(capsys.readouterr().out.split())


def test_a_model_behind_a_url(tmp_path):
    def answer(request):
        made = any(m["role"] == "tool" for m in request["messages"])
        return "It is done." if made else MAKE

    file = tmp_path / "report.json"
    with StubServer(answer) as server:
        arguments = f"--domain mock --policy {server.url} --max-tasks 1 --trials 2"
        assert main([*arguments.split(), "--json", str(file)]) == 0
    made = json.loads(file.read_text())
    assert made["pass_hat"] == {"1": 1.0, "2": 1.0} and made["floor"] == 0.0
    assert "tool_choice" not in server.requests[0]


def test_a_model_that_is_not_there(capsys):
    with StubServer(lambda request: "Hi") as server:
        url = server.url
    arguments = f"--domain mock --policy {url} --max-tasks 1 --retries 0"
    assert main(arguments.split()) == 1
    error = capsys.readouterr().err
    assert f"the policy at {url} cannot be reached" in error


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--policy best", "expected gold, refuse, or a URL"),
        ("--policy gold --trials 0", "--trials 0; expected at least 1"),
        ("--policy gold --split dev --domain airline", "no split 'dev'"),
        ("--policy gold --user nobody", "expected rule, or a URL"),
    ],
)
def test_what_cannot_be_evaluated(arguments, message, capsys):
    assert main(["--domain", "mock", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
