"""Pairs of a correct and a corrupted answer, for DPO and reward models with AReaL.

The last result is corrupted, both where it is computed and where it is given, so that a
pair shares its prompt and most of its steps:

    chosen    6*9=54  54+15=69  #### 69
    rejected  6*9=54  54+15=79  #### 79
"""

from __future__ import annotations

import random
import re
from decimal import Context, Decimal
from typing import TYPE_CHECKING

from areal_dta.tasks.gsm8k import as_dataset, final_answer, load_problems, prompt_ids
from areal_dta.tasks.supervised import example, question_messages, turn_end

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_MARK = "####"
_SLIPS = (-10, -2, -1, 1, 2, 10)
# Not the parts of a fraction: of 2 1/2, only the 2.
_NUMBER = re.compile(r"(?<![/\d.])-?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?![/\d])")
_EXACT = Context(prec=200)


def load_dataset(
    path: str,
    split: str = "train",
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
    *,
    num_problems: int | None = None,
    seed: int = 0,
    system_prompt: str = "",
) -> Dataset:
    """Load problems as pairs, one per row.

    Args:
        path: see `areal_dta.tasks.supervised.load_dataset`, also for the others.
        max_length: maximum tokens per sequence; pairs with a longer one are dropped.

    Returns:
        The columns that AReaL's DPO and reward trainers collate: `chosen_ids`,
        `chosen_loss_mask`, `rejected_ids`, `rejected_loss_mask`.

    Raises:
        ValueError: as `areal_dta.tasks.supervised.load_dataset`.
    """
    if tokenizer is None:
        raise ValueError("preference pairs need a tokenizer; pass one.")
    problems, source = load_problems(path, split, num_problems, seed)
    end = turn_end(tokenizer)
    rng = random.Random(seed)
    rows, num_dropped = [], 0
    for problem in problems:
        messages = question_messages(problem["question"], system_prompt)
        prompt = prompt_ids(tokenizer, messages)
        right, wrong = problem["answer"], corrupted(rng, problem["answer"])
        chosen = example(tokenizer, prompt, f"{right}{end}")
        rejected = example(tokenizer, prompt, f"{wrong}{end}")
        longest = max(len(chosen["input_ids"]), len(rejected["input_ids"]))
        if max_length is not None and longest > max_length:
            num_dropped += 1
            continue
        rows.append(
            {
                "chosen_ids": chosen["input_ids"],
                "chosen_loss_mask": chosen["loss_mask"],
                "rejected_ids": rejected["input_ids"],
                "rejected_loss_mask": rejected["loss_mask"],
            }
        )
    return as_dataset(rows, num_dropped, max_length, source)


def corrupted(rng: random.Random, solution: str) -> str:
    """Return the solution with a wrong result, in the notation of the right one.

    Args:
        solution: ends in ``#### N``.
    """
    steps, _, final = solution.rpartition(_MARK)
    match = _NUMBER.search(final, final.rfind("=") + 1)
    if match is None:  # a glyph such as ½
        return corrupted(rng, f"{steps}{_MARK} {final_answer(solution)}")
    result = _value(match[0])
    slips = [slip for slip in _SLIPS if result + slip >= 0 or result < 0]
    wrong = _EXACT.add(result, rng.choice(slips))

    def replaced(number: re.Match[str]) -> str:
        if _value(number[0]) != result:
            return number[0]
        grouping = "," if "," in number[0] else ""
        num_decimals = len(number[0].partition(".")[2])
        return f"{wrong:{grouping}.{num_decimals}f}"

    # Behind the last "=", since GSM8K gives the result twice: <<6*9=54>>54
    computed = steps.rfind("=") + 1
    return (
        f"{steps[:computed]}{_NUMBER.sub(replaced, steps[computed:])}{_MARK}"
        f"{final[: match.start()]}{replaced(match)}{final[match.end() :]}"
    )


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
