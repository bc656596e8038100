r"""Reward of math word problems: 1.0 when the final answer is the right number.

Which number is the final answer:

1. Text behind the first end-of-turn token does not count. A reasoning part that ends in
   ``</think>`` does not either; one that never ends has no answer after it: reward 0.
2. If the text has a ``####`` (GSM8K's mark), what follows the last one decides: the
   first number on the mark's line. If that line has none, or is a heading such as
   ``#### 3. Total`` above a text with numbers, the rest does, by the following rules.
   Nothing after the mark means no answer, even if the steps above it are right.
3. The last ``\boxed{...}`` decides, the innermost where boxes are nested.
4. Else what follows the last "answer is", "Answer:" or "A:".
5. Else the last bold text that is a number; else the last number. A further question
   that the text asks itself (a line that begins with "Question:", "Q:", "User:") and
   what follows it do not count.

In an equation the number behind the last equals sign counts; a sum or product without
one (``54 + 15``) is evaluated. Of several numbers that could each be meant (``5 or 6``)
none is. How a number may be written: `areal_dta.tasks.number_text`. Percent and
currency signs and units do not matter: GSM8K's answers are bare numbers.

No input takes long, and so nothing here needs a time-out: texts are cut to their last
characters, and an expression is evaluated by math-verify only if it consists of short
plain numbers, ``+ - * /`` and parentheses.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Final

from areal_dta.areal_fixes.loggers import task_logger
from areal_dta.tasks.number_text import NumberText, read_numbers
from areal_dta.tasks.plain_text import normalise

# The end of the text holds the answer.
_MAX_CHARACTERS: Final = 4000
_MAX_EXPRESSION: Final = 80
_ROUNDING: Final = 6
"""Decimals beyond which a rounded number equals the exact one (0.333333 and 1/3)."""

_END_OF_TURN = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|eom_id|end|end_of_text|return|END_OF_TURN_TOKEN)\|>"
    r"|<\|(?:im_start|start_header_id|user|assistant)\|>|<start_of_turn>"
    r"|<\uff5cend\u2581of\u2581sentence\uff5c>|</s>|<eos>|<end_of_turn>|<turn\|>|<\|assistant_end\|>"
)
_CHAT_TOKEN = re.compile(r"<\|[^<>|]*\|>|<(?:start_of_turn|bos|s)>|</answer>")
_OPENING_TOKENS = re.compile(rf"(?:\s*(?:{_CHAT_TOKEN.pattern}))+")
_NEXT_QUESTION = re.compile(
    r"\n[ \t]*(?:\*\*)?(?:question|problem|q|user|human|instruction)"
    r"\s*(?:\d+\s*)?(?:\*\*)?\s*:",
    re.IGNORECASE,
)
_PHRASE = re.compile(
    r"\banswer\b[^\n.:=]{0,40}?(?:\b(?:is|was|equals|would be|will be|comes to)\b|[:=])"
    r"(?!\s+not\b)|(?:^|\n)[ \t]*A[ \t]*:|<answer>"
    r"|(?:^|\n)[#*_ ]*(?:the )?(?:final )?answer[*_ ]*(?=\n)",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*([^*\n]{1,60})\*\*|__([^\n]{1,60}?)__")
_BOLD_NUMBER = re.compile(r"\s*[-+]?\W*(?:[A-Z]{1,3}\W{0,2})?\d")
_HEADING = re.compile(r"\s*(?:[Ss]tep\s*)?[1-9]\d?\s*[.):]\s+[^\s\da-z](?!.*[.!]\s*$)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\d\-+.])")
_LIST_NUMBER = re.compile(r"\s*\d{1,2}[.)]\s+(?=\S*\d)")
_DENIED = re.compile(r"\bnot\s*$", re.IGNORECASE)
# Between two numbers of an equation or a sum: units, parentheses, one operator.
_OPERATOR = re.compile(
    r"(?:\s*(?!x\b)[A-Za-z%]{1,20}){0,3}(?P<closing>[\s)\]]*)(?P<operator>[-+*/x]|[=≈→]+)"
    r"(?P<opening>[\s(\[]*)"
)
_ALTERNATIVE = re.compile(
    r"\s*|\s*(?:[A-Za-z]+\s*)?(?:[,;/&~-]|\b(?:or|and|to)\b)\s*(?:[a-z]\s*=\s*)?",
    re.IGNORECASE,
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

    Has AReaL's reward signature and never raises. `answer` is a number as text, or a
    reference solution that ends in ``#### N``.
    """
    gold = parse_final_answer(str(answer))
    if gold is None:
        task_logger("math_reward").warning(
            "the reference answer %r is not a number; reward 0.", answer
        )
        return 0.0
    value = parse_final_answer(str(completions))
    return float(value is not None and _is_same(gold, value))


def parse_final_answer(text: str) -> Fraction | None:
    """Return the final answer of `text`; None if it gives none, or not just one."""
    _, ended, after = text.rpartition("</think>")
    if ended:
        text = after
    elif "<think>" in text:
        return None
    opening = _OPENING_TOKENS.match(text)
    text = text[opening.end() if opening else 0 :]
    text = _CHAT_TOKEN.sub("\n", _END_OF_TURN.split(text, maxsplit=1)[0])
    before, mark, text = text.rpartition("####")
    if mark:
        text = text[:_MAX_CHARACTERS]
        line, _, text = text.lstrip().partition("\n")
        box = _last_box(line)
        if box is not None:
            return _only_number(box)
        plain = normalise(line)
        is_heading = _HEADING.match(plain) and read_numbers(normalise(text))
        if read_numbers(plain) and not is_heading:
            return _only_number(line)
        text = f"{line}\n{text}"
    return _from_prose(text[-_MAX_CHARACTERS:])


def _from_prose(text: str) -> Fraction | None:
    """Apply the rules for a text without a mark."""
    if (further := _NEXT_QUESTION.search(text)) and read_numbers(
        normalise(text[: further.start()])
    ):
        text = text[: further.start()]
    box = _last_box(text)
    if box is not None:
        return _only_number(box)
    for match in reversed(list(_PHRASE.finditer(text))):
        line, _, rest = text[match.end() :].partition("\n")
        for part in (line, rest.lstrip().partition("\n")[0]):
            if read_numbers(normalise(part)):
                return _only_number(_LIST_NUMBER.sub("", part, count=1))
    for match in reversed(list(_BOLD.finditer(text))):
        content = match[1] or match[2]
        if _BOLD_NUMBER.match(normalise(content)) and not _HEADING.match(content):
            return _only_number(content)
    return _last_number(normalise(text))


def _only_number(text: str) -> Fraction | None:
    """Return the number that a short text gives: its first, or where that leads."""
    plain = normalise(text)
    numbers = read_numbers(plain)
    if not numbers:
        return None
    end = _end_of_chain(plain, numbers, 0)
    if end + 1 < len(numbers) and _ALTERNATIVE.fullmatch(
        plain[numbers[end].end : numbers[end + 1].start]
    ):
        return None
    return _value_of_chain(plain, numbers, 0, end)


def _last_number(plain: str) -> Fraction | None:
    """Return the last number of a text, or the result of the equation it ends."""
    numbers = [
        number
        for number in read_numbers(plain)
        if not _DENIED.search(plain, max(0, number.start - 8), number.start)
    ]
    if not numbers:
        return None
    first = len(numbers) - 1
    while first and _operator(plain, numbers, first - 1):
        first -= 1
    return _value_of_chain(plain, numbers, first, len(numbers) - 1)


def _operator(
    plain: str, numbers: list[NumberText], index: int
) -> re.Match[str] | None:
    """Match what joins a number to the next in an equation or a sum."""
    start, end = numbers[index].end, numbers[index + 1].start
    if end - start > 60 or "\n" in plain[start:end]:
        return None
    return _OPERATOR.fullmatch(plain, start, end)


def _end_of_chain(plain: str, numbers: list[NumberText], start: int) -> int:
    end = start
    while end + 1 < len(numbers) and _operator(plain, numbers, end):
        end += 1
    return end


def _value_of_chain(
    plain: str, numbers: list[NumberText], start: int, end: int
) -> Fraction | None:
    """Return what numbers that operators join amount to: the part behind the last =."""
    found = (_operator(plain, numbers, i) for i in range(start, end))
    operators = [match for match in found if match]  # none is missing in a chain
    for index in range(len(operators) - 1, -1, -1):
        if operators[index]["operator"][0] in "=≈→":
            start, operators = start + index + 1, operators[index + 1 :]
            break
    if not operators:
        return numbers[start].value
    terms = [
        str(v) if v.denominator == 1 and v >= 0 else f"({v})"
        for v in (number.value for number in numbers[start : end + 1])
        if v is not None
    ]
    if len(terms) <= len(operators):  # one cannot be read
        return None
    expression = terms[0]
    for term, operator in zip(terms[1:], operators, strict=True):
        expression += ")" * operator["closing"].count(")")
        expression += operator["operator"].replace("x", "*")
        expression += "(" * operator["opening"].count("(") + term
    missing = expression.count(")") - expression.count("(")
    return _evaluate("(" * missing + expression + ")" * -missing)


def _evaluate(expression: str) -> Fraction | None:
    """Evaluate a sum or product of plain numbers."""
    if len(expression) > _MAX_EXPRESSION:
        return None
    # Here, because few answers need it and the import takes seconds.
    import sympy  # type: ignore[import-untyped]
    from math_verify import ExprExtractionConfig, parse

    for value in parse(expression, (ExprExtractionConfig(),), parsing_timeout=None):
        if isinstance(value, sympy.Expr) and value.is_number:
            exact = sympy.nsimplify(value.doit(), rational=True)
            if exact.is_Rational:
                return Fraction(int(exact.p), int(exact.q))
    return None


def _last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed``, the innermost where they are nested.

    ``""`` for an empty one; None if there is no box.
    """
    for match in reversed(list(_BOX.finditer(text))):
        content = text[match.end() :]
        if not content.startswith("{"):  # \boxed 5
            number = re.match(r"[-+]?[\d.,]+", content)
            return number[0] if number else None
        depth = 0
        for end, character in enumerate(content):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return content[1:end]
    return None


def _is_same(gold: Fraction, value: Fraction) -> bool:
    return gold == value or round(gold, _ROUNDING) == round(value, _ROUNDING)
