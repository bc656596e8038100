"""The dataset loader: its three kinds of path, its columns, its complaints."""

import json
from pathlib import Path

import datasets
import pytest

from areal_dta.embedded.problems import split_of
from areal_dta.tasks.gsm8k import BOXED_INSTRUCTION, final_answer, load_dataset
from areal_dta.tasks.math_reward import math_reward_fn

SHARED = Path(__file__).parents[2] / "../shared/data/gsm8k"
ROW = {"question": "What is 2 plus 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}


class WordTokenizer:
    """One token per word, and two for the template."""

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return f"<user> {messages[0]['content']} <assistant>"

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": text.split()}


def write(path, *lines):
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return str(path)


def test_embedded_problems():
    train = load_dataset("embedded", "train", num_problems=40, seed=1)
    test = load_dataset("embedded", "test", num_problems=20, seed=1)
    assert train.column_names == ["messages", "answer"]
    assert (len(train), len(test)) == (40, 20)
    (turn,) = train[0]["messages"]
    assert turn["role"] == "user" and split_of(turn["content"]) == "train"
    assert split_of(test[0]["messages"][0]["content"]) == "test"
    assert all(answer.isdecimal() for answer in train["answer"])
    again = load_dataset("embedded", "train", num_problems=40, seed=1)
    other = load_dataset("embedded", "train", num_problems=40, seed=2)
    assert train.to_list() == again.to_list() != other.to_list()


def test_embedded_default_sizes():
    assert len(load_dataset("embedded", "train")) == 2048
    assert len(load_dataset("embedded", "test")) == 256


def test_a_jsonl_file(tmp_path):
    big = {"question": "Öl für 1.234 €?", "answer": "#### 1,234"}
    path = write(tmp_path / "data.jsonl", ROW, "", big)
    assert load_dataset(path, "train").to_list() == [
        {
            "messages": [
                {"role": "user", "content": ROW["question"] + BOXED_INSTRUCTION}
            ],
            "answer": "5",
        },
        {
            "messages": [
                {"role": "user", "content": big["question"] + BOXED_INSTRUCTION}
            ],
            "answer": "1234",
        },
    ]
    assert len(load_dataset(path, "train", num_problems=1)) == 1
    plain = load_dataset(path, "train", instruction="")
    assert plain[0]["messages"][0]["content"] == ROW["question"]


def test_long_prompts_are_dropped_and_counted(tmp_path, warnings):
    long = {"question": "word " * 8, "answer": "#### 1"}
    path = write(tmp_path / "data.jsonl", ROW, long, ROW)
    # The short question has 5 words, and the template 2 tokens.
    kept = load_dataset(path, "train", WordTokenizer(), 7, instruction="")
    assert kept["answer"] == ["5", "5"]
    assert len(warnings) == 1 and "dropped 1 of 3 problems" in warnings[0]
    with pytest.raises(ValueError, match="no usable problem.*max_length=6"):
        load_dataset(path, "train", WordTokenizer(), 6, instruction="")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": ', "not JSON"),
        ("[1, 2]", "got a JSON list"),
        ({"question": "?"}, "'answer' is None"),
        ({"question": 5, "answer": "#### 5"}, "'question' is 5"),
        ({"question": " ", "answer": "#### 5"}, "'question' is ' '"),
        ({"question": "?", "answer": "five"}, "does not end in '#### N'"),
        ({"question": "?", "answer": "#### five"}, "does not end in '#### N'"),
        ({"question": "?", "answer": "#### 5\nDone."}, "does not end in '#### N'"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    path = write(tmp_path / "data.jsonl", ROW, line)
    with pytest.raises(ValueError) as caught:
        load_dataset(path, "train")
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b'\n{"question": "\xff"}\n')
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        load_dataset(str(path), "train")


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="'nowhere.jsonl' does not exist; give"):
        load_dataset("nowhere.jsonl", "train")
    with pytest.raises(ValueError, match="is a directory"):
        load_dataset(str(tmp_path), "train")
    with pytest.raises(ValueError, match="has no usable problem"):
        load_dataset(write(tmp_path / "empty.jsonl"), "train")
    with pytest.raises(ValueError, match="split='dev'"):
        load_dataset("embedded", "dev")
    with pytest.raises(ValueError, match="needs a tokenizer"):
        load_dataset("embedded", "train", max_length=10)
    with pytest.raises(ValueError, match="num_problems=0"):
        load_dataset("embedded", "train", num_problems=0)


def test_the_hub_name(monkeypatch):
    calls = []

    def load(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list([ROW, ROW])

    monkeypatch.setattr(datasets, "load_dataset", load)
    dataset = load_dataset("openai/gsm8k", "test", num_problems=1)
    assert calls == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert dataset["answer"] == ["5"]


def test_an_unreachable_hub_gives_one_clear_line(monkeypatch):
    def load(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\nand a long tail")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError) as caught:
        load_dataset("openai/gsm8k", "train")
    message = str(caught.value)
    assert "Couldn't reach the Hub." in message and "JSONL file" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("x\n#### 5", "5"),
        ("#### -1,234.5 ", "-1234.5"),
        ("#### $ .5", "0.5"),
        ("#### −42", "-42"),
        ("#### +42 apples", "42"),
        ("#### 1 234", "1234"),
        ("#### 2 1/2", "2.5"),
        ("#### \\frac13", "1/3"),
        ("#### 2 million", "2000000"),
    ],
)
def test_final_answer(solution, answer):
    assert final_answer(solution) == answer


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/gsm8k")
@pytest.mark.parametrize(("split", "num"), [("train", 7473), ("test", 1319)])
def test_the_real_gsm8k(split, num):
    dataset = load_dataset(str(SHARED / f"{split}.jsonl"), split)
    assert len(dataset) == num
    for answer in dataset["answer"][::20]:
        assert math_reward_fn("", f"So: \\boxed{{{answer}}}", [], [], answer) == 1.0
