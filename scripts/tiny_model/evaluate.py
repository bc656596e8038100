"""Measures a small model on generated problems, with and without the calculator."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from areal_dta.embedded import SYSTEM_PROMPT
from areal_dta.embedded.calculator import CALCULATOR_TOOL, evaluate
from areal_dta.embedded.problems import Problem, iter_problems
from tiny_model.corpus import Message

_MAX_NEW_TOKENS = 48
_MAX_TURNS = 6
_BATCH_SIZE = 64
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FINAL_ANSWER = re.compile(r"#### (\d+)\Z")
# Evaluation draws its test problems with a seed of its own.
_SEED_OFFSET = 10_000


@dataclass(frozen=True, slots=True)
class Setting:
    """How the problems are presented to the model."""

    name: str
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()


SETTINGS: tuple[Setting, ...] = (
    Setting("plain"),
    Setting("system prompt", SYSTEM_PROMPT),
    Setting("new system prompt", "Please read the question and reply to it."),
    Setting("calculator", "Use the calculator for each step.", (CALCULATOR_TOOL,)),
)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    chats: list[list[Message]],
    tools: tuple[dict[str, Any], ...] = (),
    temperature: float = 1.0,
) -> list[str]:
    """Generate the next assistant turn of each chat; temperature 0 is greedy."""
    prompts = [
        tokenizer.apply_chat_template(
            chat, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
        for chat in chats
    ]
    replies: list[str] = []
    for start in range(0, len(prompts), _BATCH_SIZE):
        encoded = tokenizer(
            prompts[start : start + _BATCH_SIZE],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        output = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=_MAX_NEW_TOKENS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **sampling,
        )
        new_ids = output[:, encoded["input_ids"].shape[1] :]
        replies += tokenizer.batch_decode(new_ids, skip_special_tokens=True)
    return replies


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[str],
    setting: Setting,
    temperature: float,
) -> list[list[Message]]:
    """Return the finished chats, with tool calls answered."""
    system = [] if setting.system is None else [("system", setting.system)]
    chats = [
        [{"role": r, "content": c} for r, c in [*system, ("user", question)]]
        for question in questions
    ]
    open_chats = chats
    for _ in range(_MAX_TURNS):
        if not open_chats:
            break
        replies = generate(model, tokenizer, open_chats, setting.tools, temperature)
        still_open = []
        for chat, reply in zip(open_chats, replies, strict=True):
            chat.append({"role": "assistant", "content": reply})
            call = _TOOL_CALL.search(reply)
            if setting.tools and call is not None:
                chat.append({"role": "tool", "content": _tool_result(call[1])})
                still_open.append(chat)
        open_chats = still_open
    return chats


def _tool_result(call: str) -> str:
    try:
        return str(evaluate(json.loads(call)["arguments"]["expression"]))
    except (ValueError, KeyError, TypeError):
        return "error"


def is_right(problem: Problem, chat: list[Message]) -> bool:
    """Return whether the last turn ends in the correct ``#### N``."""
    final = _FINAL_ANSWER.search(chat[-1]["content"])
    return final is not None and int(final[1]) == problem.result


def accuracy_table(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    num_problems: int,
    seed: int,
    settings: Sequence[Setting] = SETTINGS,
) -> str:
    """Format a Markdown table of accuracies on test problems, sampled and greedy."""
    was_training = model.training
    model.eval()
    stream = iter_problems(_SEED_OFFSET + seed, "test")
    problems = list(islice(stream, num_problems))
    lines = [
        f"| setting, {num_problems} problems | T=1 | greedy | tool calls, T=1 |",
        "|---|---|---|---|",
    ]
    for setting in settings:
        torch.manual_seed(seed)
        cells: list[str] = []
        for temperature in (1.0, 0.0):
            questions = [problem.question for problem in problems]
            chats = answer(model, tokenizer, questions, setting, temperature)
            pairs = zip(problems, chats, strict=True)
            right = sum(is_right(problem, chat) for problem, chat in pairs)
            cells.append(f"{right / num_problems:.3f}")
            if temperature > 0:
                texts = [m["content"] for chat in chats for m in chat]
                num_calls = sum("<tool_call>" in text for text in texts)
        lines.append(f"| {setting.name} | {' | '.join(cells)} | {num_calls} |")
    model.train(was_training)
    return "\n".join(lines)
