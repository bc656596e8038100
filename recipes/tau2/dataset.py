"""The tasks of a domain as a dataset for AReaL: one row per episode to play."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from areal_dta.tasks.gsm8k import rendered
from recipes.tau2.domains import DOMAINS, agent_context, find_domain, task_ids

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


def load_dataset(
    path: str,
    split: str = "train",
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
    *,
    repeat: int = 1,
    tasks: list[str] | None = None,
    seed: int | None = None,
) -> Dataset:
    """Load tasks with the columns `domain` and `task_id`.

    Args:
        path: name of the domain.
        split: "train" or "test", or another of tau2's.
        tokenizer: counts the tokens that `max_length` limits.
        max_length: maximum tokens of the first prompt (instructions, tools, ticket); an
            episode needs room behind it.
        repeat: how often each task comes per epoch; the smallest splits hold less than
            a batch.
        tasks: keep only these.
        seed: seed of the order of the tasks; None keeps tau2's.

    Raises:
        ValueError: no such domain, split or task, tau2 is not installed, or a prompt is
            too long.
    """
    from datasets import Dataset

    if path not in DOMAINS:
        raise ValueError(
            f"train_dataset.path={path!r} is no tau2 domain; "
            f"expected one of {', '.join(DOMAINS)}"
        )
    if repeat < 1:
        raise ValueError(f"repeat={repeat}; expected at least 1")
    ids = task_ids(path, split)
    if tasks is not None:
        if unknown := sorted(set(tasks) - set(ids)):
            raise ValueError(
                f"{path}, split {split}, has no usable task {', '.join(unknown)}; "
                f"it has {', '.join(ids[:8])}{', ...' if len(ids) > 8 else ''}"
            )
        ids = tuple(task_id for task_id in ids if task_id in tasks)
    if max_length is not None and tokenizer is not None:
        _check_lengths(path, ids, tokenizer, max_length)
    rows = [{"domain": path, "task_id": i} for _ in range(repeat) for i in ids]
    if seed is not None:
        random.Random(seed).shuffle(rows)
    return Dataset.from_list(rows)


def _check_lengths(
    domain_name: str,
    ids: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> None:
    # Only a solo agent's prompt depends on the task, so elsewhere one is enough.
    checked = ids if find_domain(domain_name).solo else ids[:1]
    for task_id in checked:
        context = agent_context(domain_name, task_id)
        text = rendered(
            tokenizer,
            [
                {"role": "system", "content": context.system_prompt},
                {"role": "user", "content": ""},
            ],
            tools=list(context.tools),
            add_generation_prompt=True,
        )
        num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if num_tokens > max_length:
            raise ValueError(
                f"the first prompt of {domain_name} task {task_id} has {num_tokens:,} "
                f"tokens, more than max_length={max_length:,}; raise it together with "
                "the model's context, or take another domain (mock is the shortest)"
            )
