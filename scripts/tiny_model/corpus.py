"""Chat conversations that the tiny model is trained on before any reinforcement.

A conversation is a worked problem: plain, with a system prompt, or with calculator
calls. Some are faulty on purpose, so that reinforcement has something to mend within
minutes. Each fault costs reward, not only style:

- `Fault.FORMAT`: correct steps, but nothing after ``####``, hence no answer at all.
- `Fault.NO_STEPS`: the answer without steps. In the text it is correct, but a model
  this small cannot compute two steps at once, so it learns to guess.
- `Fault.LAST_STEP`: a wrong operator or a slip in the last step.

The calculator's counterparts are a call in broken JSON, an answer guessed without a
call, and a call with the wrong operator.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field
from typing import Any

from areal_dta.embedded import SYSTEM_PROMPT
from areal_dta.embedded.calculator import CALCULATOR_TOOL, evaluate, tool_call_text
from areal_dta.embedded.problems import Problem, Step

Message = dict[str, str]

_SYSTEM_SENTENCES = (
    "You are a careful assistant.",
    "You are a helpful assistant.",
    "You are a math teacher.",
    "Solve the problem step by step.",
    "Write one calculation per line.",
    "Put the final answer after ####.",
    "Answer the question of the user.",
    "Be short and precise.",
)
# Letters as frequent as in English, so that noise is split into tokens like words.
_LETTERS = "eeeetttaaaooiinnsshhrrddllcummwfgypbvk"
_TOOL_SENTENCE = "Use the calculator for each step."


class Fault(enum.Enum):
    NONE = "none"
    FORMAT = "format"
    NO_STEPS = "no_steps"
    LAST_STEP = "last_step"


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of conversations in a training stage; those of `faults` add up to one."""

    system_share: float
    tool_share: float
    faults: dict[Fault, float] = field(default_factory=lambda: {Fault.NONE: 1.0})


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, the assistant's among them, and the tools that it is offered."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def sample_conversation(rng: random.Random, problem: Problem, mix: Mix) -> Conversation:
    """Draw one way of answering `problem`."""
    fault = rng.choices(list(mix.faults), list(mix.faults.values()))[0]
    user = {"role": "user", "content": problem.question}
    if rng.random() < mix.tool_share:
        messages = [_tool_system_message(rng), user]
        messages += _tool_messages(rng, problem, fault)
        return Conversation(messages, [CALCULATOR_TOOL])
    messages = [user]
    if rng.random() < mix.system_share:
        messages.insert(0, _system_message(rng))
    messages.append(_assistant(plain_answer(rng, problem, fault)))
    return Conversation(messages)


def plain_answer(rng: random.Random, problem: Problem, fault: Fault) -> str:
    """Return the assistant's text, correct or with `fault`."""
    match fault:
        case Fault.NONE:
            return problem.solution
        case Fault.FORMAT:
            return "\n".join([*map(str, problem.steps), "####"])
        case Fault.NO_STEPS:
            return f"#### {problem.result}"
        case Fault.LAST_STEP:
            text, result = _wrong_last_step(rng, problem.steps[-1])
            return "\n".join([*map(str, problem.steps[:-1]), text, f"#### {result}"])


def _wrong_last_step(rng: random.Random, step: Step) -> tuple[str, int]:
    """Return the text and the result of a miscalculated `step`."""
    if rng.random() < 0.5:
        wrong = _with_wrong_operator(rng, step)
        return str(wrong), wrong.result
    slip = rng.choice([s for s in (-10, -1, 1, 10) if step.result + s >= 0])
    return f"{step.expression}={step.result + slip}", step.result + slip


def _with_wrong_operator(rng: random.Random, step: Step) -> Step:
    others = [Step(step.left, op, step.right) for op in "+-*" if op != step.operator]
    # 2*2 and 2+2 are the same, and a negative count is not in the training text.
    return rng.choice([s for s in others if 0 <= s.result != step.result])


def _tool_messages(rng: random.Random, problem: Problem, fault: Fault) -> list[Message]:
    """Return the assistant and tool turns that solve `problem` by calculator."""
    if fault is Fault.NO_STEPS:
        return [_assistant(f"#### {problem.result}")]
    *steps, last = problem.steps
    messages: list[Message] = []
    for step in steps:
        messages += _call(step)
    if fault is Fault.FORMAT:
        broken = tool_call_text({"expression": last.expression}).replace("}}", "}")
        messages += [_assistant(broken), _tool("error"), _assistant("####")]
        return messages
    if fault is Fault.LAST_STEP:
        last = _with_wrong_operator(rng, last)
    messages += _call(last)
    messages.append(_assistant(f"#### {last.result}"))
    return messages


def _call(step: Step) -> list[Message]:
    text = tool_call_text({"expression": step.expression})
    return [_assistant(text), _tool(str(evaluate(step.expression)))]


def _system_message(rng: random.Random) -> Message:
    # A model that only saw a few prompts fails with others. So some prompts are
    # composed anew each time, and some are noise to be ignored.
    kind = rng.random()
    if kind < 0.25:
        return {"role": "system", "content": SYSTEM_PROMPT}
    if kind < 0.65:
        sentences = rng.sample(_SYSTEM_SENTENCES, rng.randint(1, 4))
        return {"role": "system", "content": " ".join(sentences)}
    words = [_noise_word(rng) for _ in range(rng.randint(3, 10))]
    return {"role": "system", "content": " ".join(words).capitalize() + "."}


def _noise_word(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(rng.choice(_SYSTEM_SENTENCES).split()).rstrip(".")
    return "".join(rng.choices(_LETTERS, k=rng.randint(2, 7)))


def _tool_system_message(rng: random.Random) -> Message:
    sentences = [*rng.sample(_SYSTEM_SENTENCES, rng.randint(0, 2)), _TOOL_SENTENCE]
    return {"role": "system", "content": " ".join(sentences)}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _tool(content: str) -> Message:
    return {"role": "tool", "content": content}
