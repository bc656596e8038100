"""The tiny model's tokenizer: byte-level BPE with ChatML and tool-call tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny_model.corpus import Conversation

VOCAB_SIZE = 512
MAX_POSITIONS = 2048
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
_SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
# Single tokens that are part of the text: decoding keeps them.
_MARKUP_TOKENS = (
    "####",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CHAT_TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(conversations: Iterable[Conversation]) -> PreTrainedTokenizerFast:
    """Train on `conversations`; any other text is encoded without loss, byte by byte.

    Each digit is a token of its own, which makes column arithmetic learnable.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_MARKUP_TOKENS),
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(conversations), trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in _MARKUP_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = CHAT_TEMPLATE_FILE.read_text()
    return fast


def _texts(conversations: Iterable[Conversation]) -> Iterator[str]:
    """Generate role names and contents, without texts that are tokens anyway."""
    markup = re.compile("|".join(map(re.escape, _MARKUP_TOKENS)))
    for conversation in conversations:
        for message in conversation.messages:
            yield message["role"]
            yield from markup.split(message["content"])
        if conversation.tools is not None:
            yield "Tools: calculator(expression)"


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Save in the form that both Transformers 4 and 5 load."""
    tokenizer.save_pretrained(directory)
    # Transformers 5 names its own backend class here, which version 4 does not know.
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")
