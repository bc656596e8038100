"""The training conversations: right ones are right, and faults are what they claim."""

import json
import random
import re

import pytest
from tiny_model.corpus import Fault, Mix, plain_answer, sample_conversation

from areal_dta.embedded.calculator import CALCULATOR_TOOL, evaluate
from areal_dta.embedded.problems import Problem, Step

PROBLEM = Problem("How many?", (Step(6, "*", 9), Step(54, "+", 15)))
CALL = re.compile(r"<tool_call>(.*)</tool_call>")


def sample(num, problem=PROBLEM, system_share=0.5, tool_share=0.5, fault=Fault.NONE):
    rng = random.Random(0)
    mix = Mix(system_share, tool_share, {fault: 1.0})
    return [sample_conversation(rng, problem, mix) for _ in range(num)]


def roles(conversation):
    return [message["role"] for message in conversation.messages]


def test_plain_answers():
    rng = random.Random(0)
    right = "6*9=54\n54+15=69\n#### 69"
    assert plain_answer(rng, PROBLEM, Fault.NONE) == right
    assert plain_answer(rng, PROBLEM, Fault.FORMAT) == "6*9=54\n54+15=69\n####"
    assert plain_answer(rng, PROBLEM, Fault.NO_STEPS) == "#### 69"
    wrong = {plain_answer(rng, PROBLEM, Fault.LAST_STEP) for _ in range(200)}
    assert wrong == {
        f"6*9=54\n{step}\n#### {step.split('=')[1]}"
        for step in ("54-15=39", "54*15=810")
        + ("54+15=59", "54+15=68", "54+15=70", "54+15=79")
    }


def test_the_last_step_of_a_twin_is_never_right_by_chance():
    # 2*2 and 2+2 agree, and 2-9 would be negative.
    rng = random.Random(0)
    for step in (Step(2, "*", 2), Step(2, "*", 9), Step(2, "-", 1)):
        problem = Problem("How many?", (step,))
        for _ in range(50):
            text = plain_answer(rng, problem, Fault.LAST_STEP)
            result = int(text.rpartition("#### ")[2])
            assert 0 <= result != step.result


def test_shares_of_system_prompts_and_tools():
    conversations = sample(2000, system_share=0.4, tool_share=0.25)
    with_tools = [c for c in conversations if c.tools is not None]
    plain = [c for c in conversations if c.tools is None]
    assert abs(len(with_tools) / 2000 - 0.25) < 0.05
    assert abs(sum("system" in roles(c) for c in plain) / len(plain) - 0.4) < 0.05
    # A tool is always announced, and never called when it is not.
    assert all("calculator" in c.messages[0]["content"] for c in with_tools)
    assert not any("<tool_call>" in m["content"] for c in plain for m in c.messages)
    assert len({c.messages[0]["content"] for c in plain}) > 300


def test_a_right_trace_calls_the_tool_for_each_step():
    (conversation,) = sample(1, tool_share=1.0)
    turns = ["assistant", "tool", "assistant", "tool", "assistant"]
    assert roles(conversation) == ["system", "user", *turns]
    assert conversation.tools == [CALCULATOR_TOOL]
    contents = [message["content"] for message in conversation.messages]
    for call, response in ((2, 3), (4, 5)):
        expression = json.loads(CALL.fullmatch(contents[call])[1])["arguments"]
        assert str(evaluate(expression["expression"])) == contents[response]
    assert contents[-1] == "#### 69"


@pytest.mark.parametrize(
    ("fault", "num_turns", "last"),
    [(Fault.NO_STEPS, 1, "#### 69"), (Fault.FORMAT, 5, "####")],
)
def test_faulty_traces(fault, num_turns, last):
    (conversation,) = sample(1, tool_share=1.0, fault=fault)
    contents = [message["content"] for message in conversation.messages[2:]]
    assert len(contents) == num_turns and contents[-1] == last
    if fault is Fault.FORMAT:
        assert contents[-2] == "error"
        with pytest.raises(json.JSONDecodeError):
            json.loads(CALL.fullmatch(contents[-3])[1])


def test_a_trace_with_the_wrong_operator_has_a_wrong_answer():
    for conversation in sample(20, tool_share=1.0, fault=Fault.LAST_STEP):
        assert conversation.messages[-1]["content"] in ("#### 39", "#### 810")
