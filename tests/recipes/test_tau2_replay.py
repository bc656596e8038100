"""Episodes to sequences: every token and mask of a small one, the file, the command.

In the expected values a sequence is a list of texts; the model wrote those in `Own`.
"""

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.tau2 import replay as replay_module
from recipes.tau2.archive import SequenceBatch, load_sequences, save_sequences
from recipes.tau2.domains import AgentContext
from recipes.tau2.messages import agent_conversation, strip_thinking
from recipes.tau2.replay import Export, main, replay
from recipes.tau2.sharing import markdown_table, sharing_statistics
from recipes.tau2.trajectories import Trajectory, read_trajectories
from recipes.tau2.turns import Template, TurnTokenizer, call_sequence


class Own(str):
    """Text that the agent's model wrote."""


def call(name, requestor="assistant", **arguments):
    return {"id": "1", "name": name, "arguments": arguments, "requestor": requestor}


def tool_result(text, requestor="assistant"):
    return {"role": "tool", "id": "1", "content": text, "requestor": requestor}


DIALOGUE = (
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Where is my bag?"},
    {"role": "assistant", "content": None, "tool_calls": [call("find", bag=7)]},
    tool_result("Rome"),
    {"role": "assistant", "content": "Look at it."},
    {"role": "user", "content": None, "tool_calls": [call("look", "user")]},
    tool_result("blue", "user"),
    {"role": "user", "content": "It is blue."},
    {"role": "assistant", "content": "Yours."},
    {"role": "user", "content": "###STOP###"},
)
SOLO = (
    {"role": "assistant", "content": None, "tool_calls": [call("find"), call("pay")]},
    tool_result("Rome"),
    tool_result("paid"),
    {"role": "assistant", "content": "###STOP###"},
)
# What joins the prompt before each call of the dialogue, and what the model writes.
BEGIN = (
    "<|im_start|>system\nBe kind.<|im_end|>\n"
    "<|im_start|>assistant\nHi!<|im_end|>\n"
    "<|im_start|>user\nWhere is my bag?<|im_end|>\n<|im_start|>assistant\n"
)
FIND = Own(
    '<tool_call>\n{"name": "find", "arguments": {"bag": 7}}\n</tool_call><|im_end|>'
)
FOUND = (
    "\n<|im_start|>user\n<tool_response>\nRome\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
LOOK = Own("Look at it.<|im_end|>")
BLUE = "\n<|im_start|>user\nIt is blue.<|im_end|>\n<|im_start|>assistant\n"
YOURS = Own("Yours.<|im_end|>")
CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
NO_THOUGHT = "<think>\n\n</think>\n\n"


def context(domain, task_id):
    return AgentContext("Be kind.", ())


def trajectory(messages=DIALOGUE, domain="airline", episode=3, task_id="t"):
    return Trajectory(episode, domain, task_id, 2, 0.5, messages)


def sequences(batch):
    return [
        (batch.sequence(i).tolist(), batch.mask(i).tolist())
        for i in range(batch.num_sequences)
    ]


def expected(tokenizer, *pieces):
    tokens, mask = [], []
    for piece in pieces:
        ids = tokenizer(str(piece))["input_ids"]
        tokens += ids
        mask += [isinstance(piece, Own)] * len(ids)
    return tokens, mask


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


def make_batch(*rows):
    """Rows of tokens, episode and task; the last token of each is trained."""
    lengths = [len(tokens) for tokens, _, _ in rows]
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    mask = np.zeros(ends[-1], bool)
    mask[ends[1:] - 1] = True
    return SequenceBatch(
        tokens=np.array([t for tokens, _, _ in rows for t in tokens], np.int32),
        loss_mask=mask,
        offsets=ends,
        domain=np.array(["airline"] * len(rows), np.str_),
        task_id=np.array([task for _, _, task in rows], np.str_),
        trial=np.zeros(len(rows), np.int32),
        episode=np.array([episode for _, episode, _ in rows], np.int32),
        call=np.zeros(len(rows), np.int32),
        reward=np.zeros(len(rows), np.float32),
    )


def test_sharing_statistics():
    batch = make_batch(
        ([1, 2, 3], 0, "a"), ([1, 2, 3, 4], 0, "a"), ([1, 2, 5], 1, "a"), ([9], 2, "b")
    )
    (s,) = sharing_statistics(batch)
    assert (s.domain, s.num_trajectories, s.num_sequences) == ("airline", 3, 4)
    assert (s.length_mean, s.length_p50, s.length_max) == (11 / 4, 3, 4)
    assert s.loss_share == 4 / 11
    assert s.sharing_ratio == 11 / 6
    assert s.sharing_ratio_trajectory == pytest.approx((7 / 4 + 1 + 1) / 3)
    assert s.sharing_ratio_task == pytest.approx((10 / 5 + 1) / 2)
    row = markdown_table([s]).splitlines()[2]
    assert row == "| airline | 3 | 4 | 3 / 3 / 4 | 36.36% | 1.8 | 1.2 | 1.5 |"


rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
        st.integers(0, 3),
        st.text(st.characters(exclude_characters="\0"), max_size=4),
    ),
    max_size=4,
)


@given(rows)
def test_the_file_gives_back_what_was_saved(tmp_path_factory, rows):
    batch = make_batch(*rows)
    path = tmp_path_factory.mktemp("archive") / "no_suffix"
    save_sequences(batch, path)
    loaded = load_sequences(path)
    assert sequences(loaded) == sequences(batch)
    for name in ("domain", "task_id", "trial", "episode", "call", "reward"):
        ours, theirs = getattr(batch, name), getattr(loaded, name)
        assert theirs.tolist() == ours.tolist() and theirs.dtype == ours.dtype


def test_a_file_that_holds_no_sequences(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(ValueError, match="no file"):
        load_sequences(path)
    path.write_bytes(b"\x80\x04not pickled either")
    with pytest.raises(ValueError, match="not an .npz file"):
        load_sequences(path)
    np.savez(path, tokens=np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="loss_mask"):
        load_sequences(path)
    np.savez(path, tokens=np.array([object()]))
    with pytest.raises(ValueError, match="allow_pickle"):
        load_sequences(path)


def test_arrays_that_make_up_no_sequences():
    batch = make_batch(([1, 2], 0, "a"), ([3], 0, "a"))
    arrays = {name: getattr(batch, name) for name in SequenceBatch.__dataclass_fields__}
    for name, wrong in {
        "offsets": np.array([0, 2], np.int64),
        "loss_mask": batch.loss_mask[:-1],
        "tokens": batch.tokens.astype(float),
        "reward": np.zeros(3, np.float32),
    }.items():
        with pytest.raises(ValueError, match="do not make up sequences"):
            SequenceBatch(**{**arrays, name: wrong})
    empty = {**arrays, "offsets": np.array([0, 3, 3], np.int64)}
    with pytest.raises(ValueError, match="do not make up sequences"):
        SequenceBatch(**empty)


def line(**changes):
    row = {"domain": "mock", "task_id": "t", "trial": 0, "reward": 1, "agent": "x"}
    return json.dumps({**row, "messages": list(DIALOGUE), **changes})


@pytest.fixture
def jsonl(tmp_path):
    def write(*lines):
        path = tmp_path / "trajectories.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def test_trajectories_keep_their_line_as_number(jsonl):
    path = jsonl(line(domain="retail"), "", line(task_id="u"), line(reward=0.25))
    episodes = read_trajectories(path, ["mock"])
    assert [t.episode for t in episodes] == [2, 3]
    assert [(t.task_id, t.reward) for t in episodes] == [("u", 1.0), ("t", 0.25)]
    assert episodes[0].messages == DIALOGUE
    assert len(read_trajectories(path)) == 3


@pytest.mark.parametrize(
    "bad, message",
    [
        ("{", "line 2"),
        ("[1]", "line 2: got a JSON list"),
        (line(trial="0"), "line 2: trial='0'; expected int"),
        (line(messages=["Hi"]), "line 2: messages holds something"),
        (line(domain="banking"), "line 2: unknown tau2 domain 'banking'"),
    ],
)
def test_a_line_that_is_no_episode(jsonl, bad, message):
    with pytest.raises(ValueError, match=message):
        read_trajectories(jsonl(line(), bad))


def test_a_file_without_the_domain(jsonl, tmp_path):
    with pytest.raises(ValueError, match="no trajectory of airline"):
        read_trajectories(jsonl(line()), ["airline"])
    with pytest.raises(ValueError, match="unknown tau2 domain 'banking'"):
        read_trajectories(jsonl(line()), ["banking"])
    with pytest.raises(ValueError, match="cannot read the trajectories"):
        read_trajectories(tmp_path / "nowhere.jsonl")


def test_the_command(letters, jsonl, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(replay_module, "agent_context", context)
    letters.save_pretrained(tmp_path / "letters")
    out = tmp_path / "new" / "mock.npz"
    path = jsonl(line(), line(domain="retail"), line(task_id="u"))
    arguments = f"--trajectories {path} --tokenizer {tmp_path / 'letters'} --out {out}"
    more = "--domain mock --export concat --template empty-think --max-sequences 2"
    assert main([*arguments.split(), *more.split()]) == 0
    batch = load_sequences(out)
    turns = ((BEGIN, FIND), (FOUND, LOOK), (BLUE, YOURS))
    pieces = [p for before, own in turns for p in (before, NO_THOUGHT, own)]
    assert sequences(batch) == [expected(letters, *pieces)] * 2
    assert batch.episode.tolist() == [0, 2]
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3 and table[2].startswith("| mock | 2 | 2 | ")
    assert table[2].endswith(" | 2.0 | 1.0 | 1.0 |")


def test_the_command_names_the_extra_where_tau2_is_missing(
    letters, jsonl, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "tau2", None)
    monkeypatch.setitem(sys.modules, "tau2.registry", None)
    letters.save_pretrained(tmp_path / "letters")
    arguments = ["--trajectories", str(jsonl(line()))]
    assert main([*arguments, "--tokenizer", str(tmp_path / "letters")]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert 'pip install -e ".[tau2]"' in message
