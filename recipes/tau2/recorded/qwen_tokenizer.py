"""Qwen3's tokenizer without a hub, from the vocabulary file that qwen-agent ships.

AReaL depends on qwen-agent, so the file is installed wherever AReaL is. Token ids are
those of the Qwen2.5 and Qwen3 models (tests compare them with tiktoken's).
"""

from __future__ import annotations

import base64
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_TEMPLATE_FILE = Path(__file__).with_name("qwen3_chat_template.jinja")
MODEL_MAX_LENGTH = 131072  # of Qwen3

# The added tokens in the order of their ids, which start right after the vocabulary.
_CONTROL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> "
    "<|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> "
    "<|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
# Part of the text: decoding keeps them even where it skips special tokens.
_MARKUP_TOKENS = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> "
    "<|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>"
).split()
_FIRST_ADDED_ID = 151643

# How text is cut before byte pairs are merged, as in qwen_agent's own tokenizer.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(name_or_path: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or a hub name; Qwen3's if None.

    Raises:
        ValueError: it cannot be loaded, or has no chat template.
    """
    if name_or_path is None:
        return build_qwen_tokenizer()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer at {name_or_path!r} ({_first_line(error)}); pass the "
            "directory of a saved one or a hub name, or nothing for Qwen3's tokenizer"
        ) from error
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer {name_or_path!r} has no chat template; "
            "pass one of an instruction-tuned model"
        )
    return tokenizer


def build_qwen_tokenizer(vocabulary: Path | None = None) -> PreTrainedTokenizerBase:
    """Build the fast tokenizer, with a chat template that renders Qwen3's format.

    Takes some seconds, so keep the result.

    Args:
        vocabulary: a `qwen.tiktoken` file; the one of qwen-agent if None.

    Raises:
        ValueError: qwen-agent is not installed, or the file is not its vocabulary.
    """
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=build_backend(vocabulary),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=MODEL_MAX_LENGTH,
    )
    fast.chat_template = CHAT_TEMPLATE_FILE.read_text(encoding="utf-8")
    return fast


def build_backend(vocabulary: Path | None = None) -> Tokenizer:
    """Build the tokenizer alone, without Transformers. Raises as the function above."""
    ranks = _read_ranks(vocabulary or _vocabulary_file())
    tokenizer = Tokenizer(_byte_pair_model(ranks))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=True) for t in _CONTROL_TOKENS]
        + [AddedToken(t, normalized=False, special=False) for t in _MARKUP_TOKENS]
    )
    return tokenizer


def _vocabulary_file() -> Path:
    # Found, not imported: importing qwen_agent configures logging and takes seconds.
    spec = find_spec("qwen_agent")
    for location in (spec.submodule_search_locations or []) if spec else []:
        file = Path(location) / "utils" / "qwen.tiktoken"
        if file.is_file():
            return file
    raise ValueError(
        "no qwen.tiktoken: it comes with qwen-agent, on which AReaL depends "
        "(pip install qwen-agent); or name another tokenizer with --tokenizer"
    )


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Read the merge rank, which is also the id, of each token's bytes."""
    try:
        lines = file.read_bytes().splitlines()
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} is not a tiktoken vocabulary ({_first_line(error)})"
        ) from error
    if sorted(ranks.values()) != list(range(_FIRST_ADDED_ID)):
        raise ValueError(
            f"{file} holds {len(ranks)} tokens; "
            f"Qwen's vocabulary holds {_FIRST_ADDED_ID}, numbered from 0"
        )
    return ranks


def _byte_pair_model(ranks: dict[bytes, int]) -> models.BPE:
    """Build the BPE model that merges as tiktoken does.

    tiktoken joins the neighbours whose union has the lowest rank, whichever way that
    token is split. So every split of a token into two tokens is a merge, in the order
    of the unions' ranks.
    """
    letters = _byte_letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            left, right = names.get(token[:cut]), names.get(token[cut:])
            if left is not None and right is not None:
                merges.append((left, right))
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    # Like tiktoken: a piece of text that is a token as a whole is never built up.
    return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)


def _byte_letters() -> dict[int, str]:
    """Return the letter that stands for each byte, as in GPT-2: printable ones for
    themselves, the others, in order, for what follows Latin-1."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in letters}
    others = (byte for byte in range(256) if byte not in names)
    return names | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
