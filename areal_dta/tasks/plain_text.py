r"""One way of writing for everything that numbers consist of.

`normalise` takes LaTeX and Markdown off numbers and rewrites what people use beside
ASCII digits: other scripts' digits, typographic signs, fraction glyphs, spaces between
thousands, words such as "minus 5" or "2 and a half". `number_text` reads the result.
"""

from __future__ import annotations

import re
import unicodedata

_MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d\u2796"
_THIN_SPACES = "\u00a0\u2007\u2008\u2009\u200a\u202f"
JOIN = "\u00a0"  # stands for every space that may separate thousands
OPAQUE = "\u22a5"  # stands for mathematics that is not a plain number
CURRENCY = (
    r"(?:[A-Z]{0,3}[$€£¥₹₽₩₺₫₱¢]|\b(?:USD|EUR|GBP|JPY|CNY|INR|CHF|Rs\.?)(?![A-Za-z]))"
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SPACED_THOUSANDS = re.compile(
    r"(?<![\w.,/:^])\d{1,3}(?: \d{3})+(?!\d|\s*/|:|-[A-Za-z])"
)
_OPENING_SIGN = re.compile(r"(?<=[{(\[$*_`])([-+])\s+(?=[\d.\\])")
_WORDS = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (
            r"(?<=\d)(?: (?:dollars?|euros?|pounds?))? and (\d\d) (?:cents|pence)\b",
            r".\1",
        ),
        (r"(?<=\d) and a half\b", " 1/2"),
        (r"(?<=\d) and a quarter\b", " 1/4"),
        (r"(?<=\d) (?:times|multiplied by) (?=\d)", " * "),
        (r"(?<=\d) plus (?=\d)", " + "),
        (r"\((\d+),(\d\d?)\)", r"(\1, \2)"),  # a pair, no decimal comma
        (r"(?<=\d) divided by (?=\d)", " / "),
    )
)
_WORD_SIGN = re.compile(
    rf"\b(?:minus|negative|Minus|Negative)\s+(?={CURRENCY}?\s*[\d.])"
)


def normalise(text: str) -> str:
    r"""Return the text with one way of writing for each thing that numbers consist of.

    LaTeX and Markdown around numbers go, fractions become ``a/b``, digits and signs of
    other scripts become ASCII, and mathematics that is not a number becomes a mark that
    makes the numbers beside it unreadable.
    """
    text = _plain_characters(text)
    text = _OPENING_SIGN.sub(r"\1", text)
    text = _without_markdown(text)
    text = _without_latex(text)
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", JOIN), text)
    for pattern, replacement in _WORDS:
        text = pattern.sub(replacement, text)
    return _WORD_SIGN.sub("-", text)


def _plain_characters(text: str) -> str:
    out: list[str] = []
    for c in text:
        if c.isascii():
            out.append(c)
        elif c in _MINUS:
            out.append("-")
        elif c in _THIN_SPACES:
            out.append(JOIN)
        elif c in "×∗⋅·✕":
            out.append("*")
        elif c == "÷":
            out.append(" / ")
        elif unicodedata.category(c) == "Cf":  # without width
            continue
        elif c in "⁰¹²³⁴⁵⁶⁷⁸⁹":
            follows = bool(out) and (out[-1] == "^" or out[-1].startswith("^"))
            out.append(("" if follows else "^") + c.translate(_SUPERSCRIPTS))
        elif c in "⁻⁺":
            out.append("^" + c.translate(_SUPERSCRIPTS))
        elif c in "√∛π∞":
            out.append(OPAQUE)
        elif unicodedata.category(c) == "No" and "FRACTION" in unicodedata.name(c, ""):
            top, _, bottom = unicodedata.normalize("NFKC", c).partition("\u2044")
            out.append(f" {top}/{bottom}" if top and bottom else OPAQUE)
        elif c == "\u2044":
            out.append("/")
        elif unicodedata.category(c) == "Nd":
            out.append(str(unicodedata.digit(c)))
        elif c in "’±≈≠—€£¥₹₽₩₺₫₱¢":
            out.append(c)
        else:
            # Full-width forms have an ASCII twin; what has none stays.
            folded = unicodedata.normalize("NFKC", c)
            out.append(folded if folded.isascii() else c)
    return "".join(out)


def _without_markdown(text: str) -> str:
    text = re.sub(r"<<[^<>\n]*>>", "", text)  # GSM8K's calculator marks
    text = re.sub(r"</?[A-Za-z]{1,10}/?>", " ", text)
    text = re.sub(r"[-=]+>", "=", text)
    # Bold, but not the power operator, which has digits or brackets on both sides.
    text = re.sub(r"(?<![\d)])\*\*|\*\*(?![\d(])|__|~~|`+", "", text)
    return re.sub(
        r"(?<![\w)*])\*(?=[^\s*])([^*\n]{1,40}?)(?<=\S)\*(?![\w(*])", r"\1", text
    )


_LATEX = (
    (re.compile(r"\\(?:left|right|displaystyle|limits|phantom)(?![A-Za-z])|\\[!]"), ""),
    (re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3})"), JOIN),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\{([.:])\}"), r"\1"),
    (re.compile(r"\\over(?![A-Za-z])"), "/"),
    (re.compile(r"\\[,;: ]|~|\\q?quad(?![A-Za-z])|\\(?:\(|\)|\[|\])"), " "),
    (re.compile(r"\\([$%#&_{}])"), r"\1"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), " / "),
    (re.compile(r"\\(?:approx|simeq|sim|equiv)(?![A-Za-z])"), "≈"),
    (re.compile(r"\\(?:rightarrow|Rightarrow|to|implies)(?![A-Za-z])"), " = "),
    (re.compile(r"\\pm(?![A-Za-z])"), "±"),
    (
        re.compile(
            r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"
        ),
        " degrees",
    ),
    (re.compile(r"\\(?:euro|EUR)(?![A-Za-z])"), "€"),
    (re.compile(r"\\pounds(?![A-Za-z])"), "£"),
    (re.compile(r"\\\\"), "\n"),
)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathit|mathsf|"
    r"bold|boldsymbol|bm|mbox|hbox|emph|underline|operatorname|color|ensuremath)\*?\s*(?=\{)"
)
# Commands that make another number of the one beside them, or a name.
_MATHEMATICS = re.compile(
    r"\\(?:sqrt|log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arc[a-z]+|[dt]?binom|frac|sum|prod|"
    r"int|lim|gcd|lcm|[pb]?mod|overline|bar|dot|infty|[Aa]lpha|[Bb]eta|[Gg]amma|[Dd]elta|"
    r"epsilon|[Tt]heta|lambda|mu|nu|xi|[Pp]i|rho|[Ss]igma|tau|[Pp]hi|chi|[Pp]si|[Oo]mega)"
    r"(?![A-Za-z])"
)
_FRAC = re.compile(r"\\(?:[dtcsx]|nice)?frac(?![A-Za-z])")


def _without_latex(text: str) -> str:
    if "\\" not in text and "{" not in text and "~" not in text:
        return text
    text = _with_plain_fractions(text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _WRAPPER.sub(" ", text)
    text = re.sub(r"\\(?:boxed|fbox|framebox)\b", " ", text)
    text = _MATHEMATICS.sub(OPAQUE, text)
    text = re.sub(r"\\[A-Za-z]+\*?", " ", text)
    # Braces group; those of an exponent stay, so that it is recognised.
    text = re.sub(r"\^\s*\{([^{}]*)\}", r"^\1", text)
    return re.sub(r"[{}]", " ", text)


def _with_plain_fractions(text: str) -> str:
    r"""Replace ``\frac{a}{b}``, ``\frac ab`` and ``\frac12`` by `` a/b``."""
    out: list[str] = []
    position = 0
    while match := _FRAC.search(text, position):
        out.append(text[position : match.start()])
        above, after = _argument(text, match.end())
        below, after = _argument(text, after)
        position = after
        top, bottom = (_plain_number(x) for x in (above, below))
        if out[-1][-1:].isdigit():  # a mixed number
            out.append(" ")
        if bottom.startswith("-"):
            top, bottom = f"-{top}".removeprefix("--"), bottom[1:]
        out.append(f"{top}/{bottom}" if top and bottom else f" {OPAQUE} ")
    out.append(text[position:])
    return "".join(out)


def _argument(text: str, start: int) -> tuple[str, int]:
    """Return one LaTeX argument and where it ends: a group, or one character."""
    while start < len(text) and text[start].isspace():
        start += 1
    if text[start : start + 1] != "{":
        return text[start : start + 1], start + 1
    depth = 0
    for end in range(start, min(len(text), start + 200)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + 1 : end], end + 1
    return "", len(text)


def _plain_number(argument: str) -> str:
    r"""Return the digits of an argument such as ``1{,}000``; ``""`` if it is more."""
    if "\\frac" in argument:
        return ""
    plain = re.sub(
        r"[\s{}$]", "", re.sub(r"\\(?:text|mathrm|mathbf)|\\[,!;]", "", argument)
    )
    return plain if re.fullmatch(r"-?[\d.,]+", plain) else ""
