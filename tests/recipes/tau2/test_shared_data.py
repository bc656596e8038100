"""Replay of real episodes, against what was measured on the set they are part of."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from recipes.tau2.domains import agent_context, find_domain
from recipes.tau2.recorded.conversation import agent_conversation
from recipes.tau2.recorded.sharing import sharing_statistics
from recipes.tau2.recorded.trajectories import read_trajectories
from recipes.tau2.recorded.turns import Template, TurnTokenizer, call_sequence
from recipes.tau2.replay import replay

TRAJECTORIES = Path(__file__).parents[3] / "../shared/data/tau2/trajectories.jsonl"

pytestmark = [
    pytest.mark.skipif(not TRAJECTORIES.exists(), reason="needs the shared data"),
    pytest.mark.skipif(not find_spec("tau2"), reason="needs the extra tau2"),
]

# Of the whole set: tokens of system prompt and tools; calls per episode; sharing ratio
# within one trajectory (plain template, a sequence a call).
PROMPT_TOKENS = {
    "airline": {4828},
    "retail": {4767},
    "telecom": {7134},
    "telecom_solo": {9901, 9904},  # the ticket's length varies with the task
}
NUM_CALLS = {
    "airline": 1641 / 140,
    "retail": 2034 / 194,
    "telecom": 1633 / 80,
    "telecom_solo": 212 / 20,
}
SHARING_RATIO = {"airline": 9.6, "retail": 7.7, "telecom": 20.1, "telecom_solo": 10.3}


@pytest.fixture(scope="module")
def trajectories():
    return read_trajectories(TRAJECTORIES)


@pytest.fixture(scope="module")
def statistics(trajectories, qwen):
    return {s.domain: s for s in sharing_statistics(replay(trajectories, qwen))}


def conversation_of(trajectory):
    agent = agent_context(trajectory.domain, trajectory.task_id)
    solo = find_domain(trajectory.domain).solo
    return agent_conversation(
        agent.system_prompt, agent.tools, trajectory.messages, solo
    )


def test_system_prompt_and_tools(trajectories, qwen):
    sizes = {domain: set() for domain in PROMPT_TOKENS}
    for domain, task_id in {(t.domain, t.task_id) for t in trajectories}:
        agent = agent_context(domain, task_id)
        text = qwen.apply_chat_template(
            [{"role": "system", "content": agent.system_prompt}],
            tools=list(agent.tools),
            tokenize=False,
        )
        sizes[domain].add(len(qwen(text)["input_ids"]))
    assert sizes == PROMPT_TOKENS


@pytest.mark.parametrize("domain", ["airline", "retail", "telecom_solo"])
def test_sharing_within_a_trajectory(statistics, domain):
    ratio = statistics[domain].sharing_ratio_trajectory
    assert ratio == pytest.approx(SHARING_RATIO[domain], rel=0.25)


def test_sharing_within_a_trajectory_of_telecom(statistics):
    """Its episodes are shorter than those of the whole set: compared call by call.

    The ratio cannot exceed the number of calls, 14.4 an episode here and 20.4 there.
    """
    s = statistics["telecom"]
    num_calls = s.num_sequences / s.num_trajectories
    assert num_calls < 0.75 * NUM_CALLS["telecom"]
    assert s.sharing_ratio_trajectory / num_calls == pytest.approx(
        SHARING_RATIO["telecom"] / NUM_CALLS["telecom"], rel=0.25
    )


def test_ids_are_those_of_the_whole_text_in_every_call(trajectories, qwen):
    """So equal text has equal ids in every call of an episode."""
    tokenizer = TurnTokenizer(qwen)
    for trajectory in trajectories[::4]:
        conversation = conversation_of(trajectory)
        turns = tokenizer.turns(conversation, trajectory.episode)
        assert len(turns) == len(conversation.calls) > 1
        for k in (0, len(turns) // 2, len(turns) - 1):
            index = conversation.calls[k]
            text = qwen.apply_chat_template(
                list(conversation.messages[:index]),
                tools=list(conversation.tools),
                tokenize=False,
                add_generation_prompt=True,
            )
            tokens, mask = call_sequence(turns[: k + 1])
            assert tokens[~mask].tolist() == qwen(text)["input_ids"]
            assert qwen.decode(tokens[~mask]) == text


@pytest.mark.parametrize("template", Template)
def test_prompts_hold_the_completions_before_them(trajectories, qwen, template):
    tokenizer = TurnTokenizer(qwen, template)
    plain = TurnTokenizer(qwen)
    for trajectory in trajectories[1::8]:
        conversation = conversation_of(trajectory)
        turns = tokenizer.turns(conversation, trajectory.episode)
        kept = [np.concatenate([t.context, t.completion]) for t in turns]
        for k in range(1, len(turns)):
            tokens, mask = call_sequence(turns[: k + 1])
            history = np.concatenate(kept[:k])
            assert tokens[: len(history)].tolist() == history.tolist()
            assert not mask[: len(history)].any() and mask[-1]
        (whole, _) = call_sequence(plain.turns(conversation, trajectory.episode))
        assert np.concatenate(kept).tolist() == whole.tolist()
