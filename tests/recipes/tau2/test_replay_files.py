"""Replayed episodes on their way to files: statistics, formats, the command."""

import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.tau2 import domains
from recipes.tau2 import replay as replay_module
from recipes.tau2.recorded.areal_batch import KEYS, areal_batch, load_areal_batch
from recipes.tau2.recorded.sequences import (
    SequenceBatch,
    load_sequences,
    save_sequences,
)
from recipes.tau2.recorded.sharing import markdown_table, sharing_statistics
from recipes.tau2.recorded.trajectories import read_trajectories
from recipes.tau2.replay import main, replay
from tests.recipes.tau2.recorded import (
    BEGIN,
    BLUE,
    DIALOGUE,
    FIND,
    FOUND,
    LOOK,
    NO_THOUGHT,
    YOURS,
    context,
    expected,
    sequences,
    trajectory,
)


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
    with pytest.raises(ValueError, match="cannot read .*nowhere.jsonl: No such file"):
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
    for value in vars(domains).values():  # what others have asked for already
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    letters.save_pretrained(tmp_path / "letters")
    arguments = ["--trajectories", str(jsonl(line()))]
    assert main([*arguments, "--tokenizer", str(tmp_path / "letters")]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert 'pip install -e ".[tau2]"' in message


def test_a_batch_of_areals(letters):
    short = DIALOGUE[:3]
    episodes = [
        trajectory(),
        trajectory(short, episode=4, task_id="u"),
        trajectory(episode=5),
    ]
    batch = replay(episodes, letters, context=context)
    first, second = areal_batch(batch)
    # task "t": two episodes of three calls each; task "u": one call
    assert first["begin_of_trajectory"].tolist() == [1, 0, 0, 1, 0, 0]
    assert second["begin_of_trajectory"].tolist() == [1]
    assert first["rewards"].tolist() == [0.5] * 6
    rows = [0, 1, 2, 4, 5, 6]  # of the flat batch, by episode: 3, 4, 5
    for row, index in enumerate(rows):
        kept = first["attention_mask"][row]
        tokens, mask = batch.sequence(index), batch.mask(index)
        assert first["input_ids"][row][kept].tolist() == tokens.tolist()
        assert first["loss_mask"][row][kept].tolist() == mask.tolist()
        assert not first["loss_mask"][row][~kept].any()
        assert (first["versions"][row] == 0).tolist() == (
            first["loss_mask"][row] == 1
        ).tolist()
    assert (
        first["input_ids"].shape == first["logprobs"].shape == (6, max(batch.lengths))
    )
    assert not first["logprobs"].any()


def test_areals_batch_passes_its_own_check_and_a_file(letters, jsonl, tmp_path):
    from areal.infra.workflow_executor import check_trajectory_format

    letters.save_pretrained(tmp_path / "letters")
    out = tmp_path / "mock.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_module, "agent_context", context)
        arguments = ["--trajectories", str(jsonl(line(), line(task_id="u")))]
        arguments += ["--tokenizer", str(tmp_path / "letters"), "--out", str(out)]
        assert main(arguments) == 0
    items = load_areal_batch(out)
    assert len(items) == 2
    for item in items:
        assert set(item) == set(KEYS)
        assert check_trajectory_format(item, batch_size=3)
        assert item["rewards"].dtype == torch.float32


def test_a_file_that_holds_no_batch(tmp_path):
    with pytest.raises(ValueError, match="holds no batch"):
        load_areal_batch(tmp_path / "nowhere.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"bad")
    with pytest.raises(ValueError, match="holds no batch"):
        load_areal_batch(tmp_path / "bad.safetensors")


def test_the_command_refuses_other_formats(jsonl, tmp_path, capsys):
    out = tmp_path / "batch.pt"
    assert main(["--trajectories", str(jsonl(line())), "--out", str(out)]) == 2
    assert "ends in .npz or .safetensors" in capsys.readouterr().err
