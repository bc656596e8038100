"""Planted reasons for lost sharing are found, placed and priced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_dta.inspect.causes import Kind
from areal_dta.inspect.corpus import Corpus, FlatTree, Limits, Record
from areal_dta.inspect.lost_sharing import LostSharing, SharingSearch
from areal_dta.inspect.rollouts.readers import Reader
from areal_dta.inspect.rollouts.text import TextTokenizer, load_tokenizer
from tests.inspect import planted
from tests.inspect.planted import in_system

UUIDS = (
    "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    "0e8a2b11-aa07-4c5d-8a10-99c1ab1234cd",
    "77aa2b11-aa07-4c5d-8a10-99c1ab1234cd",
    "9e8a2b11-bb07-4c5d-8a10-99c1ab1234cd",
)
DAYS = ("Monday", "Tuesday", "Friday", "Sunday")


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer()


def read(rows: list[Any], folder: Path, tokenizer: TextTokenizer) -> Corpus:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader, corpus = Reader(), Corpus()
    reader.tokenizer = tokenizer
    corpus.read(reader.read([path]), Limits())
    return corpus


def search(corpus: Corpus, tokenizer: TextTokenizer | None) -> LostSharing:
    return SharingSearch(FlatTree(corpus), tokenizer).run()


PLANTED: dict[str, tuple[Callable[..., None], Kind, str]] = {
    # what is planted; what is found; a text that one of the sequences has there
    "time": (
        in_system(lambda i: f"It is 2026-12-01 04:{3 + i}2:1{i} UTC."),
        Kind.TIME,
        "2:1",
    ),
    "day in words": (
        in_system(lambda i: f"Today is {i + 3} December 2026."),
        Kind.TIME,
        "3",
    ),
    "American date": (
        in_system(lambda i: f"Today is 12/0{i + 1}/2026, a {DAYS[i]}."),
        Kind.TIME,
        "day",
    ),
    "Unix time": (in_system(lambda i: f"now={1764563000 + 7919 * i}"), Kind.TIME, "70"),
    "uuid": (in_system(lambda i: f"Request {UUIDS[i]}"), Kind.IDENTIFIER, "-"),
    "request id": (
        in_system(lambda i: f"req_{('a8f3', 'b77k', 'z19q', 'm0p2')[i]}"),
        Kind.IDENTIFIER,
        "_",
    ),
    "counter": (in_system(lambda i: f"Episode {i + 11}."), Kind.NUMBER, "1"),
    "tools": (planted.shuffle_tools, Kind.TOOLS, "_"),
    "examples": (planted.shuffle_examples, Kind.PASSAGES, "customer says"),
    "JSON keys": (planted.shuffle_keys, Kind.KEYS, '":'),
    "whitespace": (planted.vary_whitespace, Kind.WHITESPACE, "\n"),
    "persona": (planted.vary_persona, Kind.SYSTEM, "kind"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_difference_is_found_and_priced(
    name: str, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    plant, kind, text = PLANTED[name]
    rows = planted.conversations()
    plant(rows)
    corpus = read(rows, tmp_path, tokenizer)
    # The truth: the tree when all conversations have what the first one has.
    for row in rows[1:]:
        row["messages"][0] = rows[0]["messages"][0]
        row["tools"] = rows[0]["tools"]
    mended = read(rows, tmp_path, tokenizer)
    truth = corpus.tree.num_tree_tokens - mended.tree.num_tree_tokens
    assert truth > 500

    found = search(corpus, tokenizer).findings
    assert found[0].kind is kind, found
    assert text in found[0].a + found[0].b
    assert found[0].role == "system"
    assert found[0].num_tokens == pytest.approx(truth, rel=0.05)
    # Placed: the two texts follow what the first sequences have before them.
    shown = tokenizer.decode(corpus.tree.sequence(0)[: found[0].position])
    assert shown.endswith(found[0].before[-8:])


def test_dropped_thoughts_are_found_and_priced(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    corpus = read(planted.conversations(thoughts=True), tmp_path, tokenizer)
    (finding,) = search(corpus, tokenizer).findings
    assert finding.kind is Kind.THOUGHTS
    assert "I ponder" in finding.a + finding.b
    # Each reply but the last is in the tree twice: behind its thoughts, and without.
    answer = "Answer 0 for customer 0 is that it has to be so, always.<|im_end|>"
    expected = 4 * 2 * len(tokenizer.encode(answer))
    assert finding.num_tokens == pytest.approx(expected, rel=0.05)
    assert finding.num_forks == 8


def test_empty_thoughts_of_the_generation_prompt_are_told(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(template_arguments={"enable_thinking": False})
    corpus = read(planted.conversations(), tmp_path, tokenizer)
    (finding,) = search(corpus, tokenizer).findings
    assert finding.kind is Kind.OPENING
    assert "<think>\n\n</think>" in finding.a + finding.b


@pytest.mark.parametrize(
    "plant, kind",
    [
        (planted.cut_history, Kind.HISTORY),
        (planted.rewrite_replies, Kind.REWRITTEN),
    ],
)
def test_histories_that_change_are_found(
    plant: Callable[..., None], kind: Kind, tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    rows = planted.conversations()
    plant(rows)
    found = search(read(rows, tmp_path, tokenizer), tokenizer).findings
    assert found[0].kind is kind
    assert found[0].num_tokens > 100


def test_nothing_is_reported_where_nothing_is_lost(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    corpus = read(planted.conversations(), tmp_path, tokenizer)
    assert search(corpus, tokenizer).findings == ()


def test_samples_of_one_prompt_may_differ() -> None:
    corpus = Corpus()
    for i in range(8):  # replies that agree again behind their first token
        tokens = np.array([*range(100), 200 + i, *range(300, 400)], np.int32)
        corpus.add(Record(tokens, f"line {i}", ((100, 201),)))
    assert search(corpus, None).findings == ()


def test_reply_that_was_encoded_again_is_found(tokenizer: TextTokenizer) -> None:
    """A history with the same text in other tokens."""
    prompt = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    reply = "Understood, the reservation has been cancelled as you wished."
    canonical = tokenizer.encode(reply)
    letters = np.concatenate([tokenizer.encode(c) for c in "Understood"])
    rest = tokenizer.encode(reply.removeprefix("Understood"))
    sampled = np.concatenate([letters, rest])
    assert tokenizer.decode(sampled) == reply
    assert not np.array_equal(sampled, canonical)
    more = tokenizer.encode("<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n")
    corpus = Corpus()
    first = np.concatenate([prompt, sampled])
    corpus.add(Record(first, "call 0", ((len(prompt), len(first)),), "e"))
    second = np.concatenate([prompt, canonical, more, tokenizer.encode("Bye.")])
    corpus.add(Record(second, "call 1", ((len(second) - 2, len(second)),), "e"))
    (finding,) = search(corpus, tokenizer).findings
    assert finding.kind is Kind.RETOKENISED
    assert finding.position == len(prompt)
    assert finding.num_tokens == pytest.approx(len(canonical), abs=1)


def test_sequences_of_which_some_begin_with_another_token() -> None:
    body = np.arange(100, 300, dtype=np.int32)
    corpus = Corpus()
    for i in range(4):
        tokens = np.concatenate([[1] * (i % 2), body, [500 + i]]).astype(np.int32)
        corpus.add(Record(tokens, f"line {i}", ((len(tokens) - 1, len(tokens)),)))
    (finding,) = search(corpus, None).findings
    assert finding.kind is Kind.BEGINNING
    assert (finding.position, finding.num_tokens) == (0, 200)


def test_shuffled_passages_are_found_in_token_ids() -> None:
    rng = np.random.default_rng(0)
    passages = [rng.integers(0, 9000, 40) for _ in range(5)]
    tail = rng.integers(0, 9000, 100)
    corpus = Corpus()
    for i in range(2):
        order = rng.permutation(5)
        parts = [np.arange(10), *(passages[k] for k in order), tail, [9001 + i]]
        corpus.add(Record(np.concatenate(parts).astype(np.int32), f"line {i}"))
    (finding,) = search(corpus, None).findings
    assert finding.kind is Kind.PASSAGES
    assert finding.position == 10
    assert finding.num_tokens == 300
