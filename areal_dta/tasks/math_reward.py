"""Reward of math word problems: 1.0 when the parsed final answer is the right number.

How the final answer is found:

1. Thoughts that end in ``</think>`` are cut off. If they never end, there is no answer:
   reward 0.
2. If the text has a ``####`` (GSM8K's mark), only what follows the last one counts.
   Nothing after it means no answer: reward 0, even if the steps above it are right.
3. In the rest, the last ``\boxed{...}`` counts if there is one.
4. In that, math-verify finds the number: after words such as "the answer is", else the
   last one.

So the embedded model is rewarded for ``#### N``, and instruct models also for the forms
that they use. Percent and currency signs, units and thousands separators are ignored:
GSM8K's answers are bare numbers.

No input takes long, so nothing here needs a timeout. math-verify's own timeouts are
signals, which work in a main thread only and cancel other alarms, and neither they nor
a thread can interrupt ``9^{9^{9}}``. Instead, math-verify gets a text of bounded length
without LaTeX, whose grammar takes exponential time on nested brackets, and its result
is compared only if it is plain arithmetic.
"""

from __future__ import annotations

import re
from typing import Any

import sympy  # type: ignore[import-untyped]
from math_verify import ExprExtractionConfig, parse, verify

from areal_dta.areal_fixes.loggers import task_logger

# The end of the text holds the answer.
_MAX_CHARACTERS = 2000
_EXTRACTION = (ExprExtractionConfig(),)
_CHAT_TOKEN = re.compile(r"<\|[^<>|]*\|>")

# Applied in this order, these turn LaTeX around numbers into plain text.
_FLATTENING = (
    (re.compile(r"\\[dt]?frac\{(-?[\d.]+)\}\{([\d.]+)\}"), r"\1/\2"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,!]"), ""),
    (re.compile(r"\\?%|\b[Pp]ercent(age)?\b"), " "),
    (re.compile(r"\\\$"), "$"),
    (re.compile(r"\\[A-Za-z]+|\\.|[{}]"), " "),
)


def math_reward_fn(
    prompt: str | None,
    completions: str,
    prompt_ids: list[int] | None,
    completion_ids: list[int] | None,
    answer: str,
    **kwargs: Any,
) -> float:
    """Return 1.0 if the final answer of `completions` equals `answer`, else 0.0.

    Never raises. The signature is that of AReaL's rewards.

    Args:
        answer: a number as text, or a reference solution that ends in ``#### N``.
    """
    gold = parse_final_answer(str(answer))
    if gold is None:
        task_logger("math_reward").warning(
            "the reference answer %r is not a number; reward 0.", answer
        )
        return 0.0
    value = parse_final_answer(str(completions))
    return float(value is not None and verify(gold, value, timeout_seconds=None))


def parse_final_answer(text: str) -> sympy.Expr | None:
    """Return the final answer of `text` as a number; None if there is none."""
    text = _CHAT_TOKEN.sub(" ", text)
    _, ended, after = text.rpartition("</think>")
    if ended:
        text = after
    elif "<think>" in text:
        return None
    text = text.rpartition("####")[2]
    text = _last_box(text) or text
    text = text.strip()[-_MAX_CHARACTERS:]
    for pattern, replacement in _FLATTENING:
        text = pattern.sub(replacement, text)
    for value in parse(text, _EXTRACTION, parsing_timeout=None):
        if _is_plain_arithmetic(value):
            return value
    return None


def _last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` if its braces are balanced."""
    _, found, content = text.rpartition("\\boxed{")
    depth = 1
    for end, character in enumerate(content):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return content[:end] if found else None
    return None


def _is_plain_arithmetic(value: object) -> bool:
    """Return whether `value` has only numbers, sums, products and quotients."""
    if not isinstance(value, sympy.Expr):
        return False
    for node in sympy.preorder_traversal(value):
        if isinstance(node, sympy.Pow):
            if node.exp != -1:  # a quotient is a product with a power of -1
                return False
        elif not isinstance(node, sympy.Number | sympy.Add | sympy.Mul):
            return False
    return True
