"""The shipped model: loads offline, is small, and is neither hopeless nor perfect."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from tiny_model.evaluate import Setting, answer, is_right
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_dta.embedded import SYSTEM_PROMPT, tiny_model_path
from areal_dta.embedded.calculator import CALCULATOR_TOOL
from areal_dta.embedded.problems import iter_problems

NUM_PROBLEMS = 64


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny_model_path()).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model_path())


def chats_and_accuracy(model, tokenizer, setting, temperature):
    problems = list(islice(iter_problems(77, "test"), NUM_PROBLEMS))
    torch.manual_seed(0)
    questions = [problem.question for problem in problems]
    chats = answer(model, tokenizer, questions, setting, temperature)
    num_right = sum(is_right(p, c) for p, c in zip(problems, chats, strict=True))
    return chats, num_right / NUM_PROBLEMS


def assistant_texts(chats):
    return [m["content"] for chat in chats for m in chat if m["role"] == "assistant"]


def test_it_is_a_small_float32_qwen3(model):
    assert model.config.model_type == "qwen3"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == 853_376
    assert model.config.tie_word_embeddings
    files = list(Path(tiny_model_path()).iterdir())
    assert sum(file.stat().st_size for file in files) < 4_000_000


def test_its_files_name_the_stop_token_and_a_portable_tokenizer(model, tokenizer):
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    config = json.loads((Path(tiny_model_path()) / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize(
    ("system", "max_calls"),
    [(None, 0), (SYSTEM_PROMPT, 2)],  # 0 and 2 of 256 when it was built
)
def test_it_knows_the_arithmetic_but_samples_badly(model, tokenizer, system, max_calls):
    setting = Setting("test", system)
    sampled_chats, sampled = chats_and_accuracy(model, tokenizer, setting, 1.0)
    _, greedy = chats_and_accuracy(model, tokenizer, setting, 0.0)
    assert 0.2 < sampled < 0.65
    assert greedy > 0.7
    # Without an announced tool it does not call one.
    texts = assistant_texts(sampled_chats)
    assert sum("<tool_call>" in text for text in texts) <= max_calls
    assert all("####" in text for text in texts[:10])


def test_it_calls_the_announced_calculator(model, tokenizer):
    setting = Setting("test", "Use the calculator for each step.", (CALCULATOR_TOOL,))
    chats, accuracy = chats_and_accuracy(model, tokenizer, setting, 1.0)
    num_calls = sum("<tool_call>" in text for text in assistant_texts(chats))
    assert num_calls > NUM_PROBLEMS / 2
    assert accuracy > 0.1
