"""Tokenizers that several recipe tests share."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes.tau2.recorded.qwen_tokenizer import (
    CHAT_TEMPLATE_FILE,
    build_qwen_tokenizer,
)

CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


@pytest.fixture(scope="session")
def qwen():
    return build_qwen_tokenizer()


@pytest.fixture(scope="session")
def letters():
    """A token a byte, with Qwen3's chat template: quick, and easy to check by eye."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in CONTROL_TOKENS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE_FILE.read_text()
    return fast
