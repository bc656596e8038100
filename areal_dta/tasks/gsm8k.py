"""GSM8K-style word problems as a dataset for AReaL's RLVR workflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Context, Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_dta.areal_fixes.loggers import task_logger
from areal_dta.embedded import generate_problems
from areal_dta.embedded.problems import SPLITS
from areal_dta.tasks.jsonl import read_jsonl
from areal_dta.tasks.math_reward import parse_final_answer
from areal_dta.tasks.number_text import MAX_DIGITS

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

EMBEDDED = "embedded"
HUB_NAME = "openai/gsm8k"
_HUB_CONFIGURATION = "main"

# What AReaL's own GSM8K task appends. The embedded model was not trained with it.
BOXED_INSTRUCTION = "\nPlease put your final answer within \\boxed{}."

_DEFAULT_NUM_PROBLEMS = {"train": 2048, "test": 256}
_EXACT = Context(prec=2 * MAX_DIGITS)
_EXPECTED_LINE = (
    "expected one JSON object per line like "
    '{"question": "...", "answer": "... #### 42"}'
)


def load_dataset(
    path: str,
    split: str = "train",
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
    *,
    num_problems: int | None = None,
    seed: int = 0,
    instruction: str | None = None,
) -> Dataset:
    """Load problems with the columns `messages` (one user turn) and `answer`.

    Args:
        path: "embedded" (generated problems), "openai/gsm8k" (from the Hugging Face
            hub), or a JSONL file with `question` and `answer`, the latter ending in
            ``#### N``.
        split: "train" or "test". A JSONL file is one split, whatever this says.
        tokenizer: renders the prompts that `max_length` limits.
        max_length: maximum tokens per prompt; longer ones are dropped, and their number
            is logged.
        num_problems: maximum number of problems, before long ones are dropped. None
            means all; for "embedded" 2,048 for training and 256 for testing.
        seed: seed of the generated problems.
        instruction: appended to each question. None means nothing for "embedded", and
            otherwise AReaL's request to put the answer into a box.

    Returns:
        A dataset whose `answer` is the final number as text without separators, for
        `areal_dta.tasks.math_reward.math_reward_fn`.

    Raises:
        ValueError: no such dataset, an invalid line, the hub cannot be reached, or no
            problem is left.
    """
    if max_length is not None and tokenizer is None:
        raise ValueError(
            f"max_length={max_length} needs a tokenizer to count tokens with; "
            "pass one, or leave max_length out."
        )
    problems, source = load_problems(path, split, num_problems, seed)
    if instruction is None:
        instruction = "" if path == EMBEDDED else BOXED_INSTRUCTION

    rows = []
    num_dropped = 0
    for problem in problems:
        content = problem["question"] + instruction
        messages = [{"role": "user", "content": content}]
        if max_length is not None and tokenizer is not None:
            if len(prompt_ids(tokenizer, messages)) > max_length:
                num_dropped += 1
                continue
        rows.append({"messages": messages, "answer": final_answer(problem["answer"])})
    return as_dataset(rows, num_dropped, max_length, source)


def load_problems(
    path: str, split: str, num_problems: int | None, seed: int
) -> tuple[Iterable[dict[str, str]], str]:
    """Load problems with `question` and `answer`, and how messages call their source.

    Arguments and errors are those of `load_dataset`.
    """
    if num_problems is not None and num_problems < 1:
        raise ValueError(f"num_problems={num_problems} must be at least 1, or None.")
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown; use one of {SPLITS}.")
    if path == EMBEDDED:
        num = num_problems or _DEFAULT_NUM_PROBLEMS[split]
        return generate_problems(num, seed, split), EMBEDDED
    if path == HUB_NAME:
        return islice(_load_hub(split), num_problems), f"{HUB_NAME}, split {split}"
    return islice(_iter_jsonl(path), num_problems), path


def as_dataset(
    rows: list[dict[str, Any]], num_dropped: int, max_length: int | None, source: str
) -> Dataset:
    """Build the dataset of the rows that are short enough; log how many were not.

    Raises:
        ValueError: there are no rows.
    """
    from datasets import Dataset

    if num_dropped:
        task_logger("gsm8k").warning(
            "dropped %d of %d problems of %s: they are longer than %d tokens.",
            num_dropped,
            num_dropped + len(rows),
            source,
            max_length,
        )
    if not rows:
        raise ValueError(
            f"{source} has no usable problem ({num_dropped} were longer than "
            f"max_length={max_length}); raise max_length or give another dataset."
        )
    return Dataset.from_list(rows)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> list[int]:
    """Tokenize a conversation up to the assistant's next turn, like a rollout."""
    text = rendered(tokenizer, messages, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    **options: Any,
) -> str:
    """Return the text that the chat template makes of a conversation.

    Args:
        options: more arguments of `apply_chat_template`.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses the messages.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    # ValueError: there is no template.
    except (TemplateError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        remedy = "use a model whose template takes them"
        if messages[0]["role"] == "system":
            remedy = f"leave out dataset_kwargs.system_prompt, or {remedy}"
        name, reason = tokenizer.name_or_path, " ".join(str(error).split())
        raise ValueError(
            f"the chat template of {name!r} refuses the turns {roles}: {reason:.200}; "
            f"{remedy}."
        ) from error
    return str(text)


def final_answer(solution: str) -> str:
    """Return the number after the last ``####`` as a decimal, or else as a fraction.

    `areal_dta.tasks.math_reward` reads it, like the answers that are compared with it.

    Raises:
        ValueError: the solution does not end in ``#### N``.
    """
    line = solution.rpartition("####")[2].strip()
    has_mark = "####" in solution and "\n" not in line
    value = parse_final_answer(f"#### {line}") if has_mark else None
    if value is None:
        raise ValueError(f"the answer {solution[-60:]!r} does not end in '#### N'.")
    for num_decimals in range(MAX_DIGITS):
        scaled = value * 10**num_decimals
        if scaled.denominator == 1:
            return str(Decimal(scaled.numerator).scaleb(-num_decimals, _EXACT))
    return str(value)


def _iter_jsonl(path: str) -> Iterator[dict[str, str]]:
    file = Path(path)
    if not file.is_file():
        reason = "is a directory" if file.is_dir() else "does not exist"
        raise ValueError(
            f"dataset path {path!r} {reason}; give a JSONL file, {EMBEDDED!r}, "
            f"or {HUB_NAME!r}."
        )
    for number, problem in read_jsonl(path, _EXPECTED_LINE):
        _check(problem, f"{path}, line {number}")
        yield problem


def _check(problem: dict[str, Any], where: str) -> None:
    for field in ("question", "answer"):
        value = problem.get(field)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(
                f"{where}: {field!r} is {value!r}, not a text; {_EXPECTED_LINE}."
            )
    try:
        final_answer(problem["answer"])
    except ValueError as error:
        raise ValueError(f"{where}: {error} Mend or remove the line.") from error


def _load_hub(split: str) -> Iterable[dict[str, str]]:
    import datasets

    try:
        return datasets.load_dataset(HUB_NAME, _HUB_CONFIGURATION, split=split)
    # OSError is the base of connection errors, offline mode and a missing dataset.
    except OSError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"cannot load {HUB_NAME!r} from the Hugging Face hub: {reason}. Check the "
            f"network, give a local GSM8K JSONL file, or use {EMBEDDED!r}."
        ) from error
