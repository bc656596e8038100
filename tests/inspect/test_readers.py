"""Every kind of file is read, and what cannot be read is told in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_dta.inspect.corpus import Corpus, InputError, Limits
from areal_dta.inspect.rollouts import jsonl
from areal_dta.inspect.rollouts.readers import Reader
from areal_dta.inspect.rollouts.text import TextTokenizer, load_tokenizer
from tests.inspect import planted


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer()


def read(path: Path, tokenizer: TextTokenizer | None = None, **options: Any) -> Corpus:
    reader, corpus = Reader(**options), Corpus()
    reader.tokenizer = tokenizer
    corpus.read(reader.read([path]), Limits())
    return corpus


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sequences(corpus: Corpus) -> list[list[int]]:
    return [corpus.tree.sequence(i).tolist() for i in range(len(corpus))]


@pytest.mark.parametrize(
    "row, spans",
    [
        ([3, 1, 4], None),
        ({"input_ids": [3, 1, 4]}, None),
        ({"tokens": [3, 1, 4], "loss_mask": [0, 1, 1]}, ((1, 3),)),
        ({"token_ids": [3, 1, 4], "loss_mask": [0, 0, 1.0]}, ((2, 3),)),
        ({"prompt_ids": [3], "completion_ids": [1, 4]}, ((1, 3),)),
        ({"input_ids": [3, 1, 4, 0], "attention_mask": [1, 1, 1, 0]}, None),
    ],
)
def test_token_lists(row: Any, spans: Any, tmp_path: Path) -> None:
    corpus = read(write(tmp_path / "x.jsonl", row))
    assert sequences(corpus) == [[3, 1, 4]]
    assert corpus.loss_spans == [spans]


def test_npz_flat_and_padded(tmp_path: Path) -> None:
    flat, padded = tmp_path / "flat.npz", tmp_path / "padded.npz"
    tokens = np.array([3, 1, 4, 1, 5], np.int32)
    np.savez(flat, tokens=tokens, offsets=[0, 3, 5], loss_mask=tokens == 4)
    ids, mask = np.array([[3, 1, 4], [1, 5, -1]]), np.array([[1, 1, 1], [1, 1, 0]])
    np.savez_compressed(padded, input_ids=ids, attention_mask=mask)
    for path in (flat, padded):
        assert sequences(read(path)) == [[3, 1, 4], [1, 5]]
    assert read(flat).loss_spans == [((2, 3),), ()]


def test_parquet_of_tokens_and_of_chats(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"input_ids": [[3, 1, 4], [1, 5]]}), path)
    assert sequences(read(path)) == [[3, 1, 4], [1, 5]]
    rows = [{"messages": row["messages"]} for row in planted.conversations(2)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    lines = write(tmp_path / "x.jsonl", *rows)
    assert sequences(read(path, tokenizer)) == sequences(read(lines, tokenizer))


def test_chat_becomes_one_sequence_per_reply(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "end"}]},
    ]
    path = write(tmp_path / "x.jsonl", {"messages": messages})
    corpus = read(path, tokenizer)
    opening = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    texts = [tokenizer.decode(s) for s in sequences(corpus)]
    assert texts[0] == opening + "Hello.<|im_end|>"
    assert texts[1].startswith(texts[0] + "\n<|im_start|>user\nBye")
    assert texts[1].endswith('{"name": "end", "arguments": {}}\n</tool_call><|im_end|>')
    (start, end), tokens = corpus.loss_spans[0][0], sequences(corpus)[0]  # type: ignore[index]
    assert tokenizer.decode(tokens[start:end]) == "Hello.<|im_end|>"
    # The last reply alone, and the conversation as one sequence with two replies.
    assert sequences(read(path, tokenizer, export="last")) == sequences(corpus)[1:]
    concat = read(path, tokenizer, export="concat")
    assert sequences(concat) == sequences(corpus)[1:]
    assert len(concat.loss_spans[0] or ()) == 2


def test_logged_request_with_its_response(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    request = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    reply = {"role": "assistant", "content": "Hello."}
    row = {"request": request, "response": {"choices": [{"message": reply}]}}
    corpus = read(write(tmp_path / "x.jsonl", row), tokenizer)
    (text,) = (tokenizer.decode(s) for s in sequences(corpus))
    assert text.endswith("<|im_start|>assistant\nHello.<|im_end|>")


def test_answers_and_what_areal_dumps(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    row = {"question": "1+1?", "solutions": [{"text": "2"}, {"text": "3"}]}
    answers = read(write(tmp_path / "a.jsonl", row), tokenizer)
    texts = [tokenizer.decode(s) for s in sequences(answers)]
    cut = texts[0].index("2<|im_end|>")
    folder = tmp_path / "rollout" / "0"
    folder.mkdir(parents=True)
    dumped = [
        {
            "task_id": 0,
            "sample_idx": i,
            "seqlen": len(tokens) + i,  # the second one was sampled otherwise
            "prompt_len": 1,
            "reward": 0.0,
            "prompt": text[:cut],
            "completion": text[cut:],
        }
        for i, (text, tokens) in enumerate(zip(texts, sequences(answers), strict=True))
    ]
    write(folder / "0.jsonl", *dumped)
    reader, corpus = Reader(tokenizer=tokenizer), Corpus()
    corpus.read(reader.read([tmp_path / "rollout"]), Limits())
    assert sequences(corpus) == sequences(answers)
    assert corpus.loss_spans == answers.loss_spans
    assert "1 of 2 dumped texts" in reader.notes[0]


def test_tau2_results_with_a_policy(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    messages = [
        {"role": "assistant", "content": "Hi! How can I help?"},
        {"role": "user", "content": "Cancel it."},
        {"role": "assistant", "content": "Done."},
    ]
    results = {
        "info": {"environment_info": {"domain_name": "my_shop", "policy": "Be kind."}},
        "simulations": [{"task_id": "7", "trial": 0, "messages": messages}],
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results, indent=1))
    reader, corpus = Reader(tokenizer=tokenizer), Corpus()
    corpus.read(reader.read([path]), Limits())
    (text,) = (tokenizer.decode(s) for s in sequences(corpus))
    assert "Be kind." in text and text.endswith("Done.<|im_end|>")
    assert corpus.groups == ["my_shop/7"]
    assert "my_shop" in reader.notes[0]


BROKEN: dict[str, tuple[str, bytes, str]] = {
    # name of the file, its content, what the message says
    "not JSON": ("x.jsonl", b"[1, 2]\n[1, 2\n", "x.jsonl, line 2: not JSON"),
    "not UTF-8": ("x.jsonl", b'{"a": "\xff\xfe"}\n', "line 1: not UTF-8"),
    "binary": ("x.jsonl", b"PK\x03\x04\x00\x00\x08\x00\n", "binary data"),
    "empty": ("x.jsonl", b"", "an empty file"),
    "blank": ("x.jsonl", b"\n \n", "no sequence in it"),
    "unknown keys": ("x.jsonl", b'{"foo": 1, "bar": 2}\n', "keys foo, bar"),
    "a number": ("x.jsonl", b"17\n", "unknown format (int)"),
    "a text": ("x.jsonl", b'"hello"\n', "unknown format (str)"),
    "empty list": ("x.jsonl", b"[]\n", "is empty"),
    "negative ids": ("x.jsonl", b"[1, -100]\n", "holds -100"),
    "huge ids": ("x.jsonl", b"[1, 99999999999]\n", "holds 99999999999"),
    "floats": ("x.jsonl", b"[1, 2.5]\n", "flat list of whole numbers"),
    "nested": ("x.jsonl", b'{"input_ids": [[1], [2, 3]]}\n', "flat list"),
    "null ids": ("x.jsonl", b'{"input_ids": null}\n', "input_ids is NoneType"),
    "short mask": (
        "x.jsonl",
        b'{"input_ids": [1, 2], "loss_mask": [1]}\n',
        "loss_mask has 1 entries for 2 tokens",
    ),
    "mixed formats": (
        "x.jsonl",
        b'[1, 2]\n{"messages": []}\n',
        "line 2: keys messages",
    ),
    "mixed tokenizers": (
        "x.jsonl",
        b'{"input_ids": [1], "tokenizer": "a"}\n{"input_ids": [1], "tokenizer": "b"}\n',
        "mixed tokenizers",
    ),
    "no reply": (
        "x.jsonl",
        b'{"messages": [{"role": "user", "content": "Hi"}]}\n',
        "no message of role assistant",
    ),
    "broken message": ("x.jsonl", b'{"messages": [17]}\n', "message 0 is int"),
    "messages of another type": (
        "x.jsonl",
        b'{"messages": [{"role": 1, "content": 2}]}\n',
        "role 1",
    ),
    "broken tools": (
        "x.jsonl",
        b'{"messages": [{"role": "assistant", "content": "a"}], "tools": "find"}\n',
        "tools is str",
    ),
    "half a character": ("x.jsonl", b'{"a": "\\ud800"}\n', "surrogate"),
    "deep": ("x.jsonl", b"[" * 100_000 + b"\n", "not JSON"),
    "kind of file": ("x.png", b"\x89PNG", "unknown kind of file '.png'"),
    "npz": ("x.npz", b"nothing of the kind", "not a readable NPZ file"),
    "parquet": ("x.parquet", b"nothing of the kind", "not a Parquet file"),
    "json": ("x.json", b'{"simulations": [1]}', "simulation 0 is not an object"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_told_in_one_line(
    name: str, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    file, content, expected = BROKEN[name]
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(path, tokenizer)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_npz_without_what_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for arrays, expected in (
        ({"logits": np.zeros(3)}, "arrays logits"),
        ({"tokens": np.arange(3)}, "without offsets"),
        ({"tokens": np.arange(3), "offsets": [0, 2]}, "do not rise from 0 to 3"),
        ({"input_ids": np.array([None])}, "input_ids is object"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(InputError, match=expected):
            read(path)


def test_malformed_lines_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('[1, 2]\n{"oops\n[1, 3]\n{"input_ids": []}\n')
    reader, corpus = Reader(skip_malformed=True), Corpus()
    corpus.read(reader.read([path]), Limits())
    assert sequences(corpus) == [[1, 2], [1, 3]]
    assert reader.num_malformed == 2
    assert "line 2" in reader.notes[0]


def test_line_without_an_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "x.jsonl"
    path.write_text("[" + "1, " * 1000 + "1]\n")
    with pytest.raises(InputError, match="line 1: longer than"):
        read(path)


def test_reading_stops_at_the_limit() -> None:
    from areal_dta.inspect.corpus import Record

    def endless():  # type: ignore[no-untyped-def]
        number = 0
        while True:
            yield Record(np.array([1, 2, number], np.int32), f"line {number}")
            number += 1

    corpus = Corpus()
    corpus.read(endless(), Limits(max_sequences=5))
    assert (len(corpus), corpus.stopped) == (5, "--max-sequences 5")
    corpus = Corpus()
    corpus.read(endless(), Limits(max_tokens=10))
    assert (len(corpus), corpus.stopped) == (3, "--max-tokens 10")


def test_tree_keeps_only_what_is_new() -> None:
    """Memory follows the tree: a long shared prefix is held once."""
    from areal_dta.inspect.corpus import Record

    corpus = Corpus()
    prefix = np.arange(100_000, dtype=np.int32)
    for i in range(20):
        corpus.add(Record(np.append(prefix, [i]).astype(np.int32), "line"))
    held = {
        id(base): base.nbytes
        for node in corpus.tree.nodes
        for base in [node.tokens if node.tokens.base is None else node.tokens.base]
    }
    assert sum(held.values()) < 2 * 8 * 100_001
