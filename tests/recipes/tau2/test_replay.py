"""Episodes to sequences: every token and mask of a small one.

In the expected values a sequence is a list of texts; the model wrote those in `Own`.
"""

import numpy as np
import pytest

from recipes.tau2 import replay as replay_module
from recipes.tau2.recorded.conversation import agent_conversation, strip_thinking
from recipes.tau2.recorded.turns import Template, TurnTokenizer, call_sequence
from recipes.tau2.replay import Export, replay
from tests.recipes.tau2.recorded import (
    BEGIN,
    BLUE,
    CONTROL_TOKENS,
    DIALOGUE,
    FIND,
    FOUND,
    LOOK,
    NO_THOUGHT,
    SOLO,
    YOURS,
    Own,
    context,
    expected,
    sequences,
    trajectory,
)


def test_individual_export_has_a_sequence_a_call(letters):
    batch = replay([trajectory()], letters, context=context)
    assert sequences(batch) == [
        expected(letters, BEGIN, FIND),
        expected(letters, BEGIN, str(FIND), FOUND, LOOK),
        expected(letters, BEGIN, str(FIND), FOUND, str(LOOK), BLUE, YOURS),
    ]
    assert batch.domain.tolist() == ["airline"] * 3
    assert batch.task_id.tolist() == ["t"] * 3
    assert batch.trial.tolist() == [2] * 3
    assert batch.episode.tolist() == [3] * 3
    assert batch.call.tolist() == [0, 1, 2]
    assert batch.reward.tolist() == [0.5] * 3


def test_concat_export_has_one_sequence_and_trains_every_reply(letters):
    batch = replay([trajectory()], letters, Export.CONCAT, context=context)
    pieces = (BEGIN, FIND, FOUND, LOOK, BLUE, YOURS)
    assert sequences(batch) == [expected(letters, *pieces)]
    assert batch.call.tolist() == [2]


def test_empty_thoughts_end_the_prompt_and_leave_the_history(letters):
    template = Template.EMPTY_THINK
    batch = replay([trajectory()], letters, template=template, context=context)
    assert sequences(batch) == [
        expected(letters, BEGIN, NO_THOUGHT, FIND),
        expected(letters, BEGIN, str(FIND), FOUND, NO_THOUGHT, LOOK),
        expected(letters, BEGIN, str(FIND), FOUND, str(LOOK), BLUE, NO_THOUGHT, YOURS),
    ]
    concat = replay([trajectory()], letters, Export.CONCAT, template, context=context)
    turns = ((BEGIN, FIND), (FOUND, LOOK), (BLUE, YOURS))
    pieces = [p for before, own in turns for p in (before, NO_THOUGHT, own)]
    assert sequences(concat) == [expected(letters, *pieces)]


def test_thoughts_are_trained_and_leave_the_history(letters):
    def run(export=Export.INDIVIDUAL, seed=0):
        return replay(
            [trajectory()],
            letters,
            export,
            Template.THINK,
            think_tokens=40,
            seed=seed,
            context=context,
        )

    batch = run()
    plain = replay([trajectory()], letters, context=context)
    replies = (FIND, LOOK, YOURS)
    thoughts = []
    for i, reply in enumerate(replies):
        tokens, mask = batch.sequence(i), batch.mask(i)
        start = int(mask.argmax())
        assert mask[start:].all()
        end = len(letters(str(reply))["input_ids"])
        assert np.concatenate([tokens[:start], tokens[-end:]]).tolist() == (
            plain.sequence(i).tolist()
        )
        thought = tokens[start:-end]
        text = letters.decode(thought)
        assert text.startswith("<think>\n") and text.endswith("\n</think>\n\n")
        assert 20 <= len(thought) - len("T\nT\n\n\n") <= 60
        assert set(letters.decode(thought[2:-4])) <= set(BEGIN)
        control = letters.convert_tokens_to_ids(list(CONTROL_TOKENS))
        assert np.isin(thought, control).sum() == 2  # the marks, and none in between
        thoughts.append(text)
    assert len(set(thoughts)) == 3
    assert sequences(run()) == sequences(batch) != sequences(run(seed=1))
    # One sequence keeps what the model wrote, as the export style of AReaL does.
    (whole,) = sequences(run(Export.CONCAT))
    turns = zip((BEGIN, FOUND, BLUE), thoughts, replies, strict=True)
    pieces = [p for before, thought, own in turns for p in (before, Own(thought), own)]
    assert whole == expected(letters, *pieces)


def test_a_solo_agent_writes_every_turn_and_stops_by_a_tool(letters):
    batch = replay([trajectory(SOLO, "telecom_solo")], letters, context=context)
    begin = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>assistant\n"
    calls = (
        '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "pay", "arguments": {}}\n</tool_call><|im_end|>'
    )
    results = (
        "\n<|im_start|>user\n<tool_response>\nRome\n</tool_response>\n"
        "<tool_response>\npaid\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    stop = '<tool_call>\n{"name": "done", "arguments": {}}\n</tool_call><|im_end|>'
    assert sequences(batch) == [
        expected(letters, begin, Own(calls)),
        expected(letters, begin, calls, results, Own(stop)),
    ]


def test_an_empty_reply_is_the_end_of_a_turn(letters):
    messages = (*DIALOGUE[:2], {"role": "assistant", "content": ""})
    batch = replay([trajectory(messages)], letters, context=context)
    assert sequences(batch) == [expected(letters, BEGIN, Own("<|im_end|>"))]


@pytest.mark.parametrize("template", Template)
def test_prefixes_hold_where_tokens_could_merge_across_a_turn(qwen, template):
    # "assistant\n" + "\n\nOne." would be tokenised otherwise if taken together.
    messages = tuple(
        {"role": role, "content": text}
        for text in ("\n\nOne.", "  two", "\tthree\n")
        for role in ("user", "assistant")
    )
    conversation = agent_conversation("Be kind.", (), messages)
    turns = TurnTokenizer(qwen, template).turns(conversation)
    joined = qwen("assistant\n\n\nOne.", add_special_tokens=False)["input_ids"]
    assert joined != qwen("assistant\n")["input_ids"] + qwen("\n\nOne.")["input_ids"]
    first = np.concatenate([turns[0].context, turns[0].completion])
    later, _ = call_sequence(turns)
    assert later[: len(first)].tolist() == first.tolist()
    assert turns[0].completion.tolist() == qwen("\n\nOne.<|im_end|>")["input_ids"]


@pytest.mark.parametrize(
    "before, after",
    [
        ("plain", "plain"),
        ("<think>\nwhy\n</think>\n\nbecause", "because"),
        ("why</think>because", "because"),  # the prompt opened the thought
        ("<think>\n\n</think>\n\n", ""),
        ("because <think>", "because <think>"),
        ("<think>a</think>b</think>c", "b</think>c"),
    ],
)
def test_strip_thinking(before, after):
    assert strip_thinking(before) == after


def test_recorded_thoughts_are_stripped(letters):
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYours."}
    batch = replay([trajectory((*DIALOGUE[:2], thought))], letters, context=context)
    assert sequences(batch) == [expected(letters, BEGIN, YOURS)]


def test_limits_cut_each_domain_after_whole_sequences(letters):
    both = [trajectory(), trajectory(SOLO, "telecom_solo", 4), trajectory(episode=5)]
    whole = replay(both, letters, context=context)
    assert whole.episode.tolist() == [3, 3, 3, 5, 5, 5, 4, 4]  # by domain
    cut = replay(both, letters, max_sequences=1, context=context)
    assert cut.episode.tolist() == [3, 4]
    budget = int(whole.lengths[:4].sum())
    cut = replay(both, letters, max_tokens=budget, context=context)
    assert cut.episode.tolist() == [3, 3, 3, 5, 4, 4]
    cut = replay(both[:1], letters, max_tokens=budget, context=context)
    assert sequences(cut) == sequences(whole)[:3]
    with pytest.raises(ValueError, match="max_tokens=9 leaves nothing of airline"):
        replay(both, letters, max_tokens=9, context=context)
    with pytest.raises(ValueError, match="max_sequences=0"):
        replay(both, letters, max_sequences=0, context=context)


def test_episodes_without_a_call_are_left_out(letters):
    silent = trajectory(DIALOGUE[:2])
    batch = replay([silent, trajectory(episode=8)], letters, context=context)
    assert batch.episode.tolist() == [8] * 3
    for export in Export:
        with pytest.raises(ValueError, match="nothing to replay"):
            replay([silent], letters, export, context=context)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"role": "system", "content": "x"}, "episode 3: message 2 has role 'system'"),
        ({"role": "user", "content": None}, "episode 3: message 2 .* content None"),
    ],
)
def test_a_message_that_tau2_does_not_record(letters, bad, message):
    messages = (*DIALOGUE[:2], bad)
    with pytest.raises(ValueError, match=message):
        replay([trajectory(messages)], letters, context=context)


def with_template(tokenizer, tmp_path, edit):
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "chat_template.jinja"
    file.write_text(edit(file.read_text()))
    return replay_module.load_tokenizer(str(tmp_path))


def test_a_chat_template_that_does_not_fit(letters, tmp_path):
    counts = with_template(letters, tmp_path, lambda t: "{{ messages | length }}" + t)
    with pytest.raises(ValueError, match="renders earlier messages differently"):
        replay([trajectory()], counts, context=context)
    other_end = with_template(
        letters, tmp_path, lambda t: t.replace("<|im_end|>", "<|end|>")
    )
    with pytest.raises(ValueError, match="does not end a turn with its eos_token"):
        replay([trajectory()], other_end, context=context)
    always = with_template(
        letters, tmp_path, lambda t: t.replace("enable_thinking", "no_such_option")
    )
    with pytest.raises(ValueError, match="use --template plain"):
        replay([trajectory()], always, template=Template.EMPTY_THINK, context=context)
