"""Worked solutions and pairs, as AReaL's SFT, DPO and reward trainers take them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from areal_dta.embedded import generate_problems, tiny_model_path
from areal_dta.tasks import preferences, supervised
from areal_dta.tasks.math_reward import math_reward_fn
from areal_dta.tree import PrefixTree

SYSTEM = "You are a careful assistant."


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_path())


def test_the_loss_is_on_the_solution_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = supervised.load_dataset(
        "embedded", tokenizer=tokenizer, num_problems=20, system_prompt=SYSTEM
    )
    assert len(rows) == 20
    for row, problem in zip(rows, generate_problems(20, 0, "train"), strict=True):
        ids, mask = row["input_ids"], row["loss_mask"]
        start = mask.index(1)
        assert mask == [0] * start + [1] * (len(ids) - start)
        assert tokenizer.decode(ids[start:]) == f"{problem['answer']}<|im_end|>"
        prompt = tokenizer.decode(ids[:start])
        assert prompt == (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
            f"<|im_start|>user\n{problem['question']}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


def test_an_example_is_what_the_chat_template_makes_of_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    (row,) = supervised.load_dataset("embedded", tokenizer=tokenizer, num_problems=1)
    (problem,) = generate_problems(1, 0, "train")
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": problem["question"]},
            {"role": "assistant", "content": problem["answer"]},
        ],
        tokenize=False,
    )
    assert f"{tokenizer.decode(row['input_ids'])}\n" == text


def test_pairs_share_all_but_the_result(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = preferences.load_dataset("embedded", tokenizer=tokenizer, num_problems=20)
    for row, problem in zip(rows, generate_problems(20, 0, "train"), strict=True):
        texts = {}
        for name in ("chosen", "rejected"):
            ids, mask = row[f"{name}_ids"], row[f"{name}_loss_mask"]
            assert len(ids) == len(mask)
            texts[name] = tokenizer.decode(ids[mask.index(1) :])
        assert texts["chosen"] == f"{problem['answer']}<|im_end|>"
        answer = problem["answer"]
        rewards = [math_reward_fn(None, t, None, None, answer) for t in texts.values()]
        assert rewards == [1.0, 0.0]
        tree = PrefixTree.from_sequences([row["chosen_ids"], row["rejected_ids"]])
        start = row["chosen_loss_mask"].index(1)
        shared = tree.num_sequence_tokens - tree.num_tree_tokens
        assert start < shared < len(row["chosen_ids"])


def test_pairs_follow_the_seed(tokenizer: PreTrainedTokenizerBase) -> None:
    first, again, other = (
        preferences.load_dataset(
            "embedded", tokenizer=tokenizer, num_problems=20, seed=seed
        )["rejected_ids"]
        for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("solution", "steps"),
    [
        ("6*9=54\n54+15=69\n#### 69", "6*9=54\n54+15={}\n#### {}"),
        ("15-5=10\n10+5=15\n#### 15", "15-5=10\n10+5={}\n#### {}"),  # an operand too
        ("It is <<6*9=54>>54.\n#### 54", "It is <<6*9={}>>{}.\n#### {}"),
        ("Just so.\n#### 7", "Just so.\n#### {}"),
    ],
)
def test_the_slip_is_where_the_result_is_computed(solution: str, steps: str) -> None:
    wrong = preferences.corrupted(random.Random(0), solution)
    number = wrong.rpartition("#### ")[2]
    assert number != solution.rpartition("#### ")[2]
    assert wrong == steps.format(*[number] * steps.count("{}"))


@pytest.mark.parametrize(
    ("solution", "form"),
    [
        ("1234*1=1234\n#### 1,234", "1234*1={0}\n#### {0:,}"),
        ("#### 12345678901234567890", "#### {0}"),
        ("1-.5=.5\n#### .5", "1-.5={0}.5\n#### {0}.5"),
        ("5+5=10\n#### $10.00", "5+5={0}\n#### ${0}.00"),
        ("so 2 1/2\n#### 2 1/2", "so {0} 1/2\n#### {0} 1/2"),
        ("#### −42 km", "#### −{0} km"),
    ],
)
def test_a_slip_keeps_the_notation(solution: str, form: str) -> None:
    for seed in range(10):
        wrong = preferences.corrupted(random.Random(seed), solution)
        digits = wrong.rpartition("####")[2].replace(",", "")
        number = int("".join(re.findall(r"\d+", digits.partition(".")[0])[:1]))
        assert wrong == form.format(number) != solution
        assert math_reward_fn(None, wrong, None, None, solution) == 0.0


def test_the_form_of_numbers_stays() -> None:
    rng = random.Random(0)
    for _ in range(20):
        assert "," in preferences.corrupted(rng, "#### 1,200")
        assert float(preferences.corrupted(rng, "#### 0").rpartition(" ")[2]) > 0
        assert preferences.corrupted(rng, "#### 2.5").endswith(".5")


@pytest.mark.parametrize("load", [supervised.load_dataset, preferences.load_dataset])
def test_long_ones_are_dropped(load, tokenizer: PreTrainedTokenizerBase) -> None:
    key = "input_ids" if load is supervised.load_dataset else "rejected_ids"
    everything = load("embedded", tokenizer=tokenizer, num_problems=50)
    limit = sorted(map(len, everything[key]))[25]
    fewer = load("embedded", tokenizer=tokenizer, num_problems=50, max_length=limit)
    assert 0 < len(fewer) < 50
    assert max(map(len, fewer[key])) <= limit
    with pytest.raises(ValueError, match="no usable problem .50 were longer"):
        load("embedded", tokenizer=tokenizer, num_problems=50, max_length=3)


@pytest.mark.parametrize("load", [supervised.load_dataset, preferences.load_dataset])
def test_a_file_of_ones_own(
    load, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    problem = {"question": "2 and 3?", "answer": "2+3=5\n#### 5"}
    path.write_text(json.dumps(problem) + "\n")
    assert len(load(str(path), tokenizer=tokenizer)) == 1
    path.write_text('{"question": "2 and 3?"}\n')
    with pytest.raises(ValueError, match="line 1"):
        load(str(path), tokenizer=tokenizer)


@pytest.mark.parametrize("load", [supervised.load_dataset, preferences.load_dataset])
def test_a_tokenizer_is_needed(load) -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        load("embedded")


TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}"
    "<end_of_turn>\n{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)


@pytest.fixture
def own_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer that a test may change."""
    return AutoTokenizer.from_pretrained(tiny_model_path())


@pytest.mark.parametrize("load", [supervised.load_dataset, preferences.load_dataset])
class TestSpecialTokens:
    def test_a_missing_eos_token_is_named(self, load, own_tokenizer) -> None:
        own_tokenizer.eos_token = None
        with pytest.raises(ValueError, match="eos_token=None.*tokenizer_config.json"):
            load("embedded", tokenizer=own_tokenizer, num_problems=2)

    def test_a_missing_pad_token_does_not_matter(self, load, own_tokenizer) -> None:
        own_tokenizer.pad_token = None
        assert len(load("embedded", tokenizer=own_tokenizer, num_problems=2)) == 2

    def test_a_turn_end_that_is_not_the_eos(self, load, own_tokenizer) -> None:
        own_tokenizer.chat_template = TEMPLATE
        rows = load("embedded", tokenizer=own_tokenizer, num_problems=2)
        for row in rows:
            ids = row.get("input_ids") or row["rejected_ids"]
            mask = row.get("loss_mask") or row["rejected_loss_mask"]
            learned = own_tokenizer.decode(ids[mask.index(1) :])
            assert learned.endswith("<end_of_turn><|im_end|>")

    def test_a_template_that_raises(self, load, own_tokenizer) -> None:
        own_tokenizer.chat_template = NO_SYSTEM
        with pytest.raises(ValueError) as caught:
            load("embedded", tokenizer=own_tokenizer, system_prompt=SYSTEM)
        message = str(caught.value)
        assert "refuses the turns system, user: System role not supported" in message
        assert "leave out dataset_kwargs.system_prompt" in message
        assert "\n" not in message

    def test_no_template(self, load, own_tokenizer) -> None:
        own_tokenizer.chat_template = None
        with pytest.raises(ValueError, match="refuses the turns user"):
            load("embedded", tokenizer=own_tokenizer, num_problems=2)
