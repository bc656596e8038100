"""The calculator agent: turns, tool results, and that training raises its reward."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from areal_dta.report.step_metrics import read_metrics
from recipes.chat import ChatClient, ChatOptions
from recipes.gsm8k_calculator.agent import solve
from tests.recipes.stub_server import StubServer

PROBLEM = [{"role": "user", "content": "6 boxes of 9?"}]


def call(arguments, name="calculator"):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def play(*answers, max_turns=6):
    """The final text, the number of turns, and what the tool answered."""
    answers = list(answers)

    async def run():
        client = ChatClient(ChatOptions(base_url=server.url), "the proxy", "-")
        messages = list(PROBLEM)
        try:
            final, num_turns = await solve(client, messages, max_turns)
        finally:
            await client.close()
        return final, num_turns, [m["content"] for m in messages if m["role"] == "tool"]

    with StubServer(lambda r: answers.pop(0) if len(answers) > 1 else answers[0]) as s:
        server = s
        return asyncio.run(run())


def test_calls_are_answered_until_there_are_none():
    answers = call('{"expression": "6*9"}'), call('{"expression": "54+1"}'), "#### 55"
    assert play(*answers) == ("#### 55", 3, ["54", "55"])


@pytest.mark.parametrize(
    "bad",
    [
        call('{"expression": "6*9"'),
        call('{"expression": "six"}'),
        call('{"expression": "9**9**9"}'),
        call("{}"),
        call('{"expression": "1"}', name="oracle"),
        "",
    ],
)
def test_what_goes_wrong_is_told_and_may_be_mended(bad):
    answers = bad, call('{"expression": "6*9"}'), "#### 54"
    assert play(*answers) == ("#### 54", 3, ["error", "54"])


@pytest.mark.parametrize(
    "arguments, results",
    [('{"expression": "6*9"}', ["54", "2"]), ('{"expression": ', ["error"] * 2)],
)
def test_calls_that_the_server_parsed_are_answered_by_their_ids(arguments, results):
    calls = [
        {"id": f"c{i}", "type": "function",
         "function": {"name": "calculator", "arguments": text}}
        for i, text in enumerate([arguments, '{"expression": "1+1"}'])
    ]  # fmt: skip

    class Client:
        answers = [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "assistant", "content": "#### 54"},
        ]

        async def complete(self, *args):
            return self.answers.pop(0)

    messages = list(PROBLEM)
    assert asyncio.run(solve(Client(), messages, 6)) == ("#### 54", 2)
    tools = [(m["tool_call_id"], m["content"]) for m in messages if m["role"] == "tool"]
    assert tools == list(zip(["c0", "c1"], results, strict=True))


def test_an_endless_loop_ends_without_an_answer():
    loop = call('{"expression": "1+1"}')
    assert play(loop, max_turns=4) == ("", 4, ["2"] * 4)


def launch(config, tmp_path, *overrides):
    command = [sys.executable, "-m", "areal_dta.launch", "--config", config]
    output = subprocess.run(
        [*command, f"cluster.fileroot={tmp_path}", *overrides],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert output.returncode == 0, output.stdout + output.stderr
    (metrics,) = Path(tmp_path).glob("*/trial0/metrics.jsonl")
    return read_metrics(metrics), output.stdout


@pytest.mark.slow
def test_training_raises_its_reward(tmp_path):
    steps, _ = launch("gsm8k_calculator.yaml", tmp_path)
    rewards = [step.reward for step in steps]
    assert sum(rewards[-10:]) / 10 - sum(rewards[:5]) / 5 >= 0.1
    assert all(step.sharing_ratio > 1 for step in steps)
    turns = [s.rollout["calculator/turns"] for s in steps if s.rollout]
    assert min(turns) > 1


@pytest.mark.slow
def test_the_tau2_smoke_run(tmp_path):
    pytest.importorskip("tau2", reason="needs the extra tau2")
    steps, output = launch("tau2_smoke.yaml", tmp_path)
    assert len(steps) == 4
    assert all(step.sharing_ratio > 2 for step in steps)
    gaps = [s.logprob_gap for s in steps if s.logprob_gap is not None]
    assert gaps and max(gaps) < 1e-3
    episodes = [s.rollout for s in steps if s.rollout]
    assert max(e["reward"] for e in episodes) < 0.5
    assert min(e["tau2/turns"] for e in episodes) >= 2
    assert all(e["tau2/reward_error"] == 0 for e in episodes)
    assert "mostly fails" in " ".join(output.split())
