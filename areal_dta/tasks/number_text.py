r"""Numbers as people and models write them, read exactly.

`read_numbers` finds the numbers of a text in order, each with its exact value:

=================================  ===================================================
written                            read as
=================================  ===================================================
``+42 −42 – 42 \u221242``          the sign counts where no number or letter precedes it
``1,234 1 234 1'234 1{,}234``      thousands; also ``1,23,456`` and ``1.234.567``
``.5 0.5 0,5 1.234,5``             decimals; a comma before one or two last digits too
``$5 5 € USD 5 5 km 5 % 5th``      currency, units, percent signs change nothing
``5k  2 million  1.5e3  2·10^3``   magnitudes
``5/2 \frac52 ½ 2 1/2 2½``         fractions and mixed numbers
=================================  ===================================================

What only looks like a number has the value None, so that nobody mistakes its digits
for an answer: ``3:30``, ``12/25/2020``, ``5\pi``, ``2^10``, ``1,2345``, ``5x``, ``±5``.
Digits that belong to a word (``H2O``, ``m²``) are not reported at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from areal_dta.tasks.plain_text import CURRENCY, JOIN, OPAQUE

MAX_DIGITS: Final = 60
"""Maximum digits of a number, exponents included: more is nobody's answer."""

_FIRST_IDEOGRAM = "\u2e80"  # Chinese and Japanese set no space before a number
_MAGNITUDES: Final = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "k": 10**3,
    "m": 10**6,
}
_DIGITS = rf"(?:\d(?:[\d.,'’_]|{JOIN}(?=\d{{3}}(?![\d/])))*|\.\d+)"
_TRAILING: Final = f".,'’_{JOIN}"
"""Characters within digits that do not belong to a number that ends in them."""
# What makes another thing of the number before it: 5^2, 5:30, 5/x, 5x, 5(6) ...
_CHANGED = re.compile(rf"\s*(?:\^|\*\*|{OPAQUE})|:\d|/\d|[abixyzn](?![A-Za-z])|\)?\(\d")
# ... and the one behind it: 2**5, 3:30, x > 5, -(5).
_CHANGING = re.compile(rf"(?:[±^/≤≥{OPAQUE}]\s*|\*\*|\d\s*:|[^\s=-]\s?[<>]\s*|-\s*\()$")
_VERB = re.compile(
    r"\b(?:is|are|was|be|equals|to|ha[sd]|have|makes?|gives?|gets?|leaves?|costs?|pa(?:ys?|id))\s*$",
    re.IGNORECASE,
)
_WHOLE_NUMBER = (
    re.compile(r"\d+"),
    re.compile(r"[1-9]\d{0,2}(?:,\d{3})+"),
    re.compile(r"\d{1,2}(?:,\d{2})+,\d{3}"),
    re.compile(rf"\d{{1,3}}(?:{JOIN}\d{{3}})+"),
    re.compile(r"\d{1,3}(?:['’_]\d{3})+"),
)
_EUROPEAN = re.compile(
    rf"\d{{1,3}}(?:[.'’{JOIN}]\d{{3}})+,\d{{1,2}}"
    r"|\d{1,3}(?:\.\d{3}){2,}|\d+,\d{1,2}|0,\d+"
)

_TOKEN = re.compile(
    rf"""
    (?P<sign>[-+]\s*)?
    (?P<currency>{CURRENCY}\s*)?
    (?P<inner>[-+]\s*)?
    (?P<digits>{_DIGITS})
    (?P<exponent>[eE][-+]?\d+(?![\w.]))?
    """,
    re.VERBOSE,
)
_FRACTION = re.compile(rf"\s*/\s*(?P<below>{_DIGITS})")
_MIXED = re.compile(
    rf"[ {JOIN}]{{1,3}}(?:and[ ])?(?P<above>\d+)\s*/\s*(?P<below>\d+)(?![\d/:])"
)
_POWER_OF_TEN = re.compile(
    r"\s*[*·]\s*10\s*\^\s*(?:\{\s*(?P<braced>[-+]?\d+)\s*\}|(?P<bare>[-+]?\d+))"
)
_MAGNITUDE = re.compile(
    rf"[ {JOIN}-]?(?P<word>hundred|thousand|[mb]illion|trillion)s?(?![A-Za-z])"
    r"|(?P<letter>[kKM])(?![A-Za-z\d])"
)


@dataclass(frozen=True, slots=True)
class NumberText:
    """A number and where it stands in the normalised text, half-open."""

    start: int
    end: int
    value: Fraction | None
    """None if it only looks like a number."""


def read_numbers(normalised: str) -> list[NumberText]:
    """Find the numbers of a normalised text, from left to right.

    Cost: linear in the length of the text.
    """
    found: list[NumberText] = []
    position = 0
    while match := _TOKEN.search(normalised, position):
        number = _read(normalised, match)
        position = max(match.end(), number.end if number else 0)
        if number is not None:
            found.append(number)
    return found


def _read(text: str, match: re.Match[str]) -> NumberText | None:
    """Read one number with all that belongs to it; None if it is part of a word."""
    start = match.start()
    signs = [s.strip() for s in (match["sign"], match["inner"]) if s]
    if signs and not _is_sign(text, start, match["sign"] or ""):
        # A hyphen or an operator: the number begins behind it.
        start += len(match["sign"] or "")
        signs = signs[1:]
    digits_at = match.start("digits")
    if not match["currency"] and start == digits_at and _continues_word(text, start):
        return None
    digits = match["digits"].rstrip(_TRAILING)
    end, value = digits_at + len(digits), _value(digits)
    if digits == match["digits"]:  # nothing belongs to a number behind its full stop
        end, value = _extended(text, end, value, digits, match)
    before = text[:start]
    if len(signs) > 1 or _CHANGING.search(before[-8:]) or _CHANGED.match(text, end):
        value = None
    elif value is not None and signs == ["-"]:
        value = -value
    return NumberText(start, end, value)


def _is_sign(text: str, start: int, sign: str) -> bool:
    """Return whether a sign belongs to the number, with nothing to subtract from."""
    if not sign:
        return True  # it stands behind a currency sign
    before = text[:start]
    if before[-1:].isalnum() or before.rstrip().endswith((*"0123456789)%", "]")):
        return False  # 15 -5, 15 - 5
    # "so - 5 of them" has a dash; "is - 5", "= - 5" and "- 5" at the start a sign.
    is_apart = sign.strip() != sign and before.rstrip()[-1:].isalpha()
    return not is_apart or _VERB.search(before[-12:]) is not None


def _continues_word(text: str, start: int) -> bool:
    before = text[start - 1] if start else ""
    if (before.isalpha() and before < _FIRST_IDEOGRAM) or before == "_":
        return True
    return before in "^" and start > 1 and text[start - 2].isalpha()


def _value(digits: str) -> Fraction | None:
    if sum(c.isdigit() for c in digits) > MAX_DIGITS:
        return None
    if _EUROPEAN.fullmatch(digits):
        whole, _, decimals = digits.partition(",")
    else:
        whole, dot, decimals = digits.partition(".")
        if dot and not decimals.isdigit():
            return None
        if whole and not any(p.fullmatch(whole) for p in _WHOLE_NUMBER):
            return None
    whole = re.sub(r"\D", "", whole)
    return Fraction(f"{whole or 0}.{decimals or 0}")


def _extended(
    text: str, end: int, value: Fraction | None, digits: str, match: re.Match[str]
) -> tuple[int, Fraction | None]:
    """Return end and value of a number with its exponent, fraction or magnitude."""
    if match["exponent"]:
        return match.end(), _times_power(value, match["exponent"][1:])
    end, value = _with_fraction(text, end, value, digits)
    if power := _POWER_OF_TEN.match(text, end):
        return power.end(), _times_power(value, power["braced"] or power["bare"])
    if magnitude := _MAGNITUDE.match(text, end):
        factor = _MAGNITUDES[(magnitude["word"] or magnitude["letter"]).lower()]
        return magnitude.end(), None if value is None else value * factor
    return end, value


def _with_fraction(
    text: str, end: int, value: Fraction | None, digits: str
) -> tuple[int, Fraction | None]:
    """Extend a number by ``/ 2`` or, if it is whole, by `` 1/2``."""
    if match := _FRACTION.match(text, end):
        below = match["below"].rstrip(_TRAILING)
        divisor = _value(below)
        end = match.start("below") + len(below)
        if re.match(r"\s*/\s*\d", text[end : end + 8]):  # a date, a chain
            return end, None
        return end, value / divisor if value is not None and divisor else None
    if "." not in digits and (match := _MIXED.match(text, end)):
        above, below_int = (
            int(match["above"][:MAX_DIGITS]),
            int(match["below"][:MAX_DIGITS]),
        )
        if 0 < above < below_int and value is not None:
            return match.end(), value + Fraction(above, below_int)
    return end, value


def _times_power(value: Fraction | None, exponent: str) -> Fraction | None:
    power = int(exponent) if len(exponent) <= 4 else MAX_DIGITS + 1
    if value is None or abs(power) > MAX_DIGITS:
        return None
    return value * Fraction(10) ** power
