r"""A strategy of answers: a number as people and models write it, with others around.

Written from what people write, not from what the parser reads: each list is one kind of
clothing, and any of one may meet any of the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import assume
from hypothesis import strategies as st

pick = st.sampled_from

MINUS = pick(["-", "−", "–", "‒", "﹣", "－", "- ", "minus ", "negative "])
PLUS = pick(["", "", "", "", "+", "＋"])
THOUSANDS = pick(
    ["", "", ",", ",", "{,}", "\\,", " ", "\u00a0", "\u2009", "\u202f", "'", "’", "_"]
)
CURRENCY_BEFORE = ["$", "\\$", "€", "£", "USD ", "US$", "€ ", "\\text{\\$}", "₹"]
BEHIND = [
    *("%", " %", "\\%", " \\%", " percent", "％", "\\text{%}"),
    *("€", " €", " dollars", " USD", "\\text{ dollars}", "¢", " cents"),
    *(
        " apples",
        " km",
        "km",
        " km/h",
        " m²",
        " cm^2",
        "\\text{ km}",
        "\\ \\mathrm{cm}",
    ),
    *("\\,\\text{kg}", "°", "^\\circ", "^{\\circ}", " per day", " hours", "g", " mL"),
]
BOXES = [
    *("\\boxed{@}", "$\\boxed{@}$.", "\\[ \\boxed{@} \\]", "\\(\\boxed{@}\\)"),
    *("\\boxed{\\boxed{@}}", "\\boxed{\\text{@}}", "\\boxed{\\textbf{@}}"),
    *("$\\mathbf{\\boxed{@}}$", "\\boxed {@}", "\\fbox{@}", "**\\boxed{@}**"),
    *("\\boxed{x = @}", "\\boxed{\\text{The answer is } @}", "\\boxed{$@$}"),
    *("\\boxed{\n@\n}", "\\boxed{\\mathrm{@}}", "\\boxed{{@}}", "$$\\boxed{@}$$"),
]
CLOTHES = [
    *("@", "@", "@", "**@**", "__@__", "*@*", "`@`", "$@$", "\\(@\\)", "\\textbf{@}"),
    *("$\\mathbf{@}$", "\\[@\\]", "$$@$$", "($@$)", "***@***", "<b>@</b>"),
]
MARKS = [
    *("#### @", "####@", "#### @.", "#### Answer: @", "#### The answer is @"),
    *("#### = @", "#### x = @", "####  @ ", "**#### @**", "#### \\boxed{@}"),
]
PHRASES = [
    *("The answer is @.", "The answer is: @", "Answer: @", "Answer: @.", "A: @"),
    *("**Answer:** @", "**Final Answer:** @", "### Answer\n@", "## Final Answer:\n\n@"),
    *("**Final Answer**\n\n@", "Final answer: @!", "So the final answer is @"),
    *("Therefore, the answer to the problem is @.", "**Answer: @**", "answer = @"),
    *("The correct answer is @", "The answer would be @.", "Our answer is thus: @"),
]
LAST = [
    *("So she has @.", "In total that is @", "It is @!", "@", "This makes @.\n"),
    *("6 * 7 = @", "x = @", "Total: @", "So in all, = @", "⇒ @", "he paid: @"),
]
END_OF_TURN = [
    *("<|im_end|>", "</s>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "<eos>"),
    *("<|end|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|eom_id|>"),
]
JUNK = ["", "\n#### @", "@", " The answer is @.", "\n<|im_start|>user\n@", "\\boxed{@}"]
BEFORE = [
    "There are @ boxes with @ each. ",
    "First, @ + @ = @.\n",
    "1. Take @.\n2. Add @.\n",
    "**Step 1:** @ is what he has.\n\n",
    "Is it @? No.\n",
    "We get \\boxed{@} at first, but wait.\n",
    "The answer is not @. ",
    "It costs $@ and takes @%.\n",
    "- @ apples\n- @ pears\n",
    "\\frac{@}{@} is too much.\n",
    "<think>maybe #### @</think>\n",
]
AFTER_MARK = ["", "\nThat took @ steps.", "\n\nQuestion: what is @?", "\n\n@ + @ = @"]
AFTER_BOX = [
    "",
    " That is more than @.",
    "\n\nQ: What is @ + @?\nA: @",
    "\n(@ is less)",
]
AFTER_PHRASE = ["", "\n\nQuestion: And with @?\nAnswer: @", "\n\nQ: @?"]
AFTER_REASON = ["", " because @ and @ make it.", " (that is, @ of them).", ", not @."]


@dataclass(frozen=True, slots=True)
class Dressed:
    """A text whose final answer is `value`; `others` are in it, too."""

    text: str
    value: Fraction
    others: tuple[Fraction, ...]


def plain(value: Fraction) -> str:
    """Write a number as a data set's gold value."""
    digits = next((n for n in range(5) if (value * 10**n).denominator == 1), None)
    return str(value) if digits is None else f"{float(value):.{digits}f}"


@st.composite
def values(draw: st.DrawFn) -> Fraction:
    kind = draw(pick(["whole", "whole", "decimal", "fraction", "large"]))
    if kind == "whole":
        value = Fraction(draw(st.integers(0, 999)))
    elif kind == "large":
        value = Fraction(draw(st.integers(1000, 10**9)))
    elif kind == "decimal":
        decimals = draw(st.integers(1, 4))
        value = Fraction(draw(st.integers(1, 10**7)), 10**decimals)
    else:
        value = Fraction(draw(st.integers(1, 99)), draw(st.integers(2, 99)))
    return -value if draw(st.integers(0, 3)) == 0 else value


def _grouped(digits: str, separator: str) -> str:
    return separator.join(f"{int(digits):,}".split(","))


def _decimal(draw: st.DrawFn, value: Fraction) -> str:
    exact = plain(value)
    whole, _, decimals = exact.partition(".")
    zeros = draw(pick(["", "", "0", "00"]))
    if not decimals:
        zeros = zeros and "00"
    separator = draw(THOUSANDS)
    comma = 0 < len(decimals + zeros) <= 2 and draw(st.integers(0, 4)) == 0
    if comma and separator not in ("", " ", "\u202f"):
        separator = "."
    whole = _grouped(whole, separator)
    if whole == "0" and decimals and not comma and draw(st.booleans()):
        whole = ""
    tail = decimals + zeros
    return f"{whole}{',' if comma else '.'}{tail}" if tail else whole


_FRACTIONS = [
    *(
        "@/@",
        "@ / @",
        "\\frac{@}{@}",
        "\\dfrac{@}{@}",
        "\\tfrac{@}{@}",
        "\\cfrac{@}{@}",
    ),
    *(
        "@⁄@",
        "\\frac{\\text{@}}{@}",
        "\\frac {@} {@}",
        "{@}/{@}",
        "\\frac{@}{\\mathrm{@}}",
    ),
]
_GLYPHS = {Fraction(1, 2): "½", Fraction(1, 4): "¼", Fraction(3, 4): "¾"}


def _fraction(draw: st.DrawFn, value: Fraction, bare: bool = True) -> str:
    above, below = str(value.numerator), str(value.denominator)
    forms = list(_FRACTIONS)
    if len(above) == len(below) == 1:
        forms += ["\\frac@@", "\\frac @@", "\\dfrac@@", "\\frac{@}@", "\\frac@{@}"]
    if value in _GLYPHS and draw(st.booleans()):
        return _GLYPHS[value]
    form = draw(pick(forms if bare else [f for f in forms if f[0] == "\\"]))
    return form.replace("@", above, 1).replace("@", below, 1)


def _mixed(draw: st.DrawFn, value: Fraction) -> str:
    whole = math.floor(value)
    rest = value - whole
    if rest in _GLYPHS and draw(st.booleans()):
        return f"{whole}{_GLYPHS[rest]}"
    if draw(st.booleans()):
        form = draw(pick(["{} {}/{}", "{} and {}/{}", "{}\u00a0{}/{}"]))
        return form.format(whole, rest.numerator, rest.denominator)
    return f"{whole}{draw(pick(['', ' ', '~']))}{_fraction(draw, rest, bare=False)}"


@st.composite
def written(draw: st.DrawFn, value: Fraction) -> str:
    """Write a number: its digits, its sign, and what stands directly beside it."""
    size = abs(value)
    exact_decimal = (size * 10**4).denominator == 1
    kinds = ["decimal"] * 3 if exact_decimal else []
    if size.denominator != 1 and size.denominator < 100:
        kinds.append("fraction")
        if size > 1:
            kinds.append("mixed")
    kind = draw(pick(kinds))
    make = {"decimal": _decimal, "fraction": _fraction, "mixed": _mixed}[kind]
    text = make(draw, size)
    sign = draw(MINUS if value < 0 else PLUS)
    beside = draw(pick(["", "", "", "before", "behind"]))
    if beside == "before" and kind == "decimal":
        currency = draw(pick(CURRENCY_BEFORE))
        inside = draw(st.booleans()) and len(sign) == 1
        return f"{currency}{sign}{text}" if inside else f"{sign}{currency}{text}"
    if beside == "behind":
        text += draw(pick(BEHIND))
    digits = draw(pick([None, None, None, None, None, "full", "zero"]))
    if digits == "full" and "\\" not in text:
        text = text.translate(str.maketrans("0123456789", "０１２３４５６７８９"))
    elif digits == "zero" and len(text) > 1 and "\\" not in text:
        text = f"{text[:1]}\u200b{text[1:]}"
    return f"{sign}{text}"


@st.composite
def dressed(draw: st.DrawFn) -> Dressed:
    """Draw an answer: its number, the mark or phrase that gives it, and the rest."""
    others: list[Fraction] = []

    def filled(form: str) -> str:
        parts = form.split("@")
        text = parts[0]
        for part in parts[1:]:
            others.append(draw(values()))
            text += plain(others[-1]) + part
        return text

    value = draw(values())
    text = draw(written(value))
    place = draw(pick(["mark", "box", "phrase", "bold", "last"]))
    if place == "box":
        text = draw(pick(BOXES)).replace("@", text)
        after = draw(pick(AFTER_BOX))
        if draw(st.integers(0, 3)) == 0:
            text = f"The answer is {text}"
    elif place == "bold":
        text = f"So it is {draw(pick(['**@**', '__@__'])).replace('@', text)}"
        after = draw(pick(AFTER_REASON))
    else:
        clothes = draw(pick(CLOTHES)) if "$" not in text else "@"
        text = clothes.replace("@", text)
        forms, afters = {
            "mark": (MARKS, [*AFTER_MARK, *AFTER_REASON]),
            "phrase": (PHRASES, AFTER_PHRASE),
            "last": (LAST, AFTER_PHRASE[:2]),
        }[place]
        text = draw(pick(forms)).replace("@", text)
        after = draw(pick(afters))
        if place == "phrase" and text[-1] not in ".!*":
            after = draw(pick([*AFTER_PHRASE, *AFTER_REASON]))
    before = "".join(filled(form) for form in draw(st.lists(pick(BEFORE), max_size=3)))
    if place in ("bold", "last", "phrase"):  # an earlier box would decide
        assume("\\boxed" not in before)
    if place in ("bold", "last"):
        assume("answer" not in before)
    if before.count("<think>") > 1 or not before.startswith("<think>"):
        assume("<think>" not in before)
    if before and before[-1] != "\n":
        before += draw(pick(["\n", "\n\n"]))
    text = f"{before}{text}{filled(after)}"
    if draw(st.booleans()):
        text += draw(pick(END_OF_TURN)) + filled(draw(pick(JUNK)))
    return Dressed(text, value, tuple(others))
