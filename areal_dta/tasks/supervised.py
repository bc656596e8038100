"""Worked solutions of word problems, for supervised fine-tuning with AReaL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_dta.tasks.gsm8k import as_dataset, load_problems, prompt_ids, rendered

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


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
    """Load problems with the columns `input_ids` and `loss_mask`.

    Args:
        path: see `areal_dta.tasks.gsm8k.load_dataset`, also for `split`,
            `num_problems` and `seed`.
        tokenizer: required; its chat template renders question and solution.
        max_length: maximum tokens per example; longer ones are dropped, and their
            number is logged.
        system_prompt: put before each question; "" for none.

    Returns:
        A dataset whose `loss_mask` is 1 at the tokens of the solution and of what ends
        the turn: the chat template's mark, and the eos token where that is another.

    Raises:
        ValueError: no tokenizer, or one without an eos token or with a chat template
            that refuses the messages; no such dataset, an invalid line, or no problem
            left.
    """
    if tokenizer is None:
        raise ValueError("supervised examples need a tokenizer; pass one.")
    problems, source = load_problems(path, split, num_problems, seed)
    end = turn_end(tokenizer)
    rows, num_dropped = [], 0
    for problem in problems:
        messages = question_messages(problem["question"], system_prompt)
        prompt = prompt_ids(tokenizer, messages)
        row = example(tokenizer, prompt, f"{problem['answer']}{end}")
        if max_length is not None and len(row["input_ids"]) > max_length:
            num_dropped += 1
        else:
            rows.append(row)
    return as_dataset(rows, num_dropped, max_length, source)


def question_messages(question: str, system_prompt: str) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": question}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def turn_end(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the model learns to write behind its answer.

    That is what the chat template puts there, up to the eos token; the eos token
    follows where the template has none, because a rollout ends at it.

    Raises:
        ValueError: the tokenizer has no eos token.
    """
    eos = tokenizer.eos_token
    if not isinstance(eos, str) or not eos:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has eos_token={eos!r}: no model "
            "would learn to stop; set eos_token in its tokenizer_config.json."
        )
    answer = "0123456789"
    messages = [*question_messages("?", ""), {"role": "assistant", "content": answer}]
    end = rendered(tokenizer, messages).rpartition(answer)[2]
    before, found, _ = end.partition(eos)
    return f"{before}{eos}" if found else f"{end.rstrip()}{eos}"


def example(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], completion_text: str
) -> dict[str, Any]:
    """Join a prompt and its completion, tokenized separately as in a rollout."""
    completion = tokenizer(completion_text, add_special_tokens=False)["input_ids"]
    return {
        "input_ids": [*prompt, *completion],
        "loss_mask": [0] * len(prompt) + [1] * len(completion),
    }
