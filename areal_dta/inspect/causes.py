"""Names the reason why two prompts part, from the two texts and what surrounds them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What differs. The value is its name in reports."""

    BEGINNING = "tokens at the beginning"
    RETOKENISED = "re-tokenisation"
    THOUGHTS = "dropped thoughts"
    OPENING = "opening of the reply"
    TIME = "date or time"
    CALL_ID = "tool-call ids"
    IDENTIFIER = "identifier"
    TOOLS = "order of the tools"
    KEYS = "order of JSON keys"
    PASSAGES = "order of passages"
    WHITESPACE = "whitespace"
    NUMBER = "number"
    HISTORY = "shortened history"
    REWRITTEN = "rewritten reply"
    SYSTEM = "system prompt"
    UNKNOWN = "short difference"


ADVICE: Final[dict[Kind, str]] = {
    Kind.BEGINNING: "Begin every sequence alike: some have a BOS token (or another "
    "control token) that others lack. Encode with add_special_tokens=False behind a "
    "chat template, everywhere or nowhere.",
    Kind.RETOKENISED: "Keep the sampled token ids as the history of later calls, "
    "instead of decoding a reply and encoding it again.",
    Kind.THOUGHTS: "Keep thoughts in the history (a template that only appends), or "
    "train whole conversations (export style concat), or cut histories at user turns.",
    Kind.OPENING: "Open replies in the prompt as the template shows them later: empty "
    "thoughts in the generation prompt (enable_thinking=false) are missing from the "
    "history. Train without them, or keep them in the history.",
    Kind.TIME: "Move the date or time behind what is constant, at best into the last "
    "user message, or fix it for an episode, or round it to a day.",
    Kind.CALL_ID: "Leave tool-call ids out of the rendered prompt, or derive them from "
    "the position (call_1, call_2, ...).",
    Kind.IDENTIFIER: "Move the identifier (request, session, user) out of the prompt, "
    "or behind what is constant.",
    Kind.TOOLS: "Sort the tools by name before the prompt is rendered.",
    Kind.KEYS: "Serialise JSON with sorted keys (json.dumps(..., sort_keys=True)).",
    Kind.PASSAGES: "Give passages (few-shot examples, retrieved documents) a fixed "
    "order, or shuffle them once per prompt and not once per sample.",
    Kind.WHITESPACE: "Render the same text the same way: trailing spaces, line ends "
    "and JSON separators differ between calls.",
    Kind.NUMBER: "Move the counter behind what is constant, or leave it out.",
    Kind.HISTORY: "Shorten histories seldom and by much rather than at each call, or "
    "drop from the end: what follows the cut shares nothing with earlier calls.",
    Kind.REWRITTEN: "Use a reply in the history exactly as it was generated (no "
    "stripping, no re-serialised tool calls).",
    Kind.SYSTEM: "Put what differs between prompts behind what they have in common.",
    Kind.UNKNOWN: "Pass --tokenizer to see the text; move what differs behind what is "
    "constant.",
}

_THOUGHTS: Final = re.compile(
    r"<(think|thinking|reasoning)>(.*?)(?:</\1>|\Z)\s*", re.DOTALL
)
_MONTHS: Final = (
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|January|February|March|April"
    r"|June|July|August|September|October|November|December)"
)
_TIMES: Final = re.compile(
    r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ,]+\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?"
    r"|\b\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}(?:[T ,]+\d{1,2}:\d{2}(?::\d{2})?)?"
    rf"|\b\d{{1,2}}(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTHS}\.?,?(?:\s+\d{{4}})?"
    rf"|\b{_MONTHS}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?\b(?:,?\s+\d{{4}})?"
    r"|\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:\s?[AaPp]\.?[Mm]\.?)?"
    r"|\b1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?\b"
    r"|\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
)
_CALL_IDS: Final = re.compile(r"\b(?:call|toolu|tool_call)[-_]\w+")
_IDENTIFIERS: Final = re.compile(
    r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|\b(?=\w*\d)(?=\w*[a-fA-F])[0-9a-fA-F]{8,}\b"
    r"|\b(?:req|request|session|sess|trace|run|user|chatcmpl|msg|id|episode|conv)"
    r"[-_#:]\w{2,}"
    r"|\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{10,}\b"
)
_NUMBERS: Final = re.compile(r"\d[\d,._]*")
_WORDS: Final = re.compile(r"\w+|[^\w\s]")
_TOOL_MARKS: Final = ('"function"', '"parameters"', "<tools>", '"tools"', "# Tools")
_LONG_TEXT = 400  # characters: a longer one is no date, identifier or number
_TOLERANCE = 0.03  # of the words, that may differ where passages are re-ordered


@dataclass(frozen=True, slots=True)
class Difference:
    """Two texts between equal surroundings."""

    before: str
    a: str
    b: str
    after: str
    role: str
    """Role of the message in which it lies, if the control tokens tell: ``system``."""
    is_first_token: bool
    is_history: bool
    """One has it as a reply, with loss, the other in its prompt."""
    is_same_episode: bool
    is_text: bool
    """False: there is no tokenizer, and the texts are token ids."""
    num_matching: int
    """Tokens in which the two agree behind it."""
    num_tokens: tuple[int, int]
    """Tokens of ``a`` and ``b``."""
    boundaries: tuple[int, int] = (0, 0)
    """Control tokens in ``a`` and ``b``."""


def cause(d: Difference) -> Kind | None:
    """Return the kind of a difference; None if it may well be meant."""
    if d.is_first_token and not (d.a and d.b):
        return Kind.BEGINNING
    if not d.is_text:
        return _cause_of_ids(d)
    if d.a == d.b:
        return Kind.RETOKENISED
    if (kind := _thoughts(d)) is not None:
        return kind
    if d.a.split() == d.b.split() or _squeezed(d.a) == _squeezed(d.b):
        return Kind.WHITESPACE
    if (kind := _pattern(d)) is not None:
        return kind
    if _is_permutation(d.a, d.b):
        return _moved(d)
    if d.is_history and d.is_same_episode:
        return Kind.HISTORY if _is_cut(d) else Kind.REWRITTEN
    if _is_cut(d) and (d.is_same_episode or not (d.a and d.b)):
        return Kind.HISTORY
    if d.role == "system" and d.num_matching >= max(64, *d.num_tokens):
        return Kind.SYSTEM
    return None


def _cause_of_ids(d: Difference) -> Kind | None:
    a, b = d.a.split(), d.b.split()
    if len(a) >= 8 and Counter(a) == Counter(b):
        return Kind.PASSAGES
    if d.is_history:
        return Kind.REWRITTEN
    is_short = max(d.num_tokens) <= 32
    return Kind.UNKNOWN if is_short and d.num_matching >= 64 else None


def _thoughts(d: Difference) -> Kind | None:
    """Find thoughts that only one of the texts has; edges may lie inside the marks."""
    found = [list(_THOUGHTS.finditer(text)) for text in (d.a, d.b)]
    # The mark itself may be common to both: "<think>" + "\n\n</think>" or thoughts.
    is_inside = d.before.rstrip().endswith(("<think>", "<thinking>", "<reasoning>"))
    if is_inside and not any(found):
        for text, other in ((d.a, d.b), (d.b, d.a)):
            thought, mark, rest = text.partition("</think")
            if thought.strip() and not other.partition("</think")[0].strip():
                return Kind.THOUGHTS
            del mark, rest
        return None
    if bool(found[0]) == bool(found[1]):
        return None
    text, other = (d.a, d.b) if found[0] else (d.b, d.a)
    if _squeezed(_THOUGHTS.sub("", text)) != _squeezed(other):
        return None
    matches = found[0] or found[1]
    has_words = any(match[2].strip() for match in matches)
    return Kind.THOUGHTS if has_words else Kind.OPENING


def _pattern(d: Difference) -> Kind | None:
    """Find a date, an identifier or a number that the two texts have different."""
    if max(len(d.a), len(d.b)) > _LONG_TEXT:
        return None
    in_prompt = d.role in ("", "system") or d.is_same_episode or d.num_matching >= 256
    patterns = [(Kind.TIME, _TIMES), (Kind.CALL_ID, _CALL_IDS)]
    if in_prompt:
        patterns += [(Kind.IDENTIFIER, _IDENTIFIERS)]
    if d.role == "system" or d.is_same_episode:
        patterns += [(Kind.NUMBER, _NUMBERS)]
    for kind, pattern in patterns:
        if all(_is_covered(d, text, pattern) for text in (d.a, d.b)):
            return kind
    return None


def _is_covered(d: Difference, text: str, pattern: re.Pattern[str]) -> bool:
    """Return whether matches of a pattern hold all words in which a text differs."""
    before, after = d.before[-80:], d.after[:80]
    whole = before + text + after
    start, end = len(before), len(before) + len(text)
    covered = [False] * len(whole)
    touches = False
    for match in pattern.finditer(whole):
        if match.end() >= start and match.start() <= end:
            touches |= match.end() > start and match.start() < end or not text
            covered[match.start() : match.end()] = [True] * len(match[0])
    return touches and all(
        covered[i] or not whole[i].isalnum() for i in range(start, end)
    )


def _is_permutation(a: str, b: str) -> bool:
    words_a, words_b = Counter(_WORDS.findall(a)), Counter(_WORDS.findall(b))
    num = max(words_a.total(), words_b.total())
    differing = (words_a - words_b).total() + (words_b - words_a).total()
    return num >= 4 and differing <= max(2 * (num >= 40), _TOLERANCE * num)


def _moved(d: Difference) -> Kind:
    text = d.before[-400:] + d.a
    if any(mark in text for mark in _TOOL_MARKS):
        names = (
            re.findall(r'"name": ?"(\w+)"', d.a),
            re.findall(r'"name": ?"(\w+)"', d.b),
        )
        if len(names[0]) > 1 and names[0] != names[1]:
            return Kind.TOOLS
    if re.search(r'"\s*:|\w+=', d.a) and len(d.a) < 4000:
        return Kind.KEYS
    return Kind.PASSAGES


def _is_cut(d: Difference) -> bool:
    """Return whether one text lacks messages that the other has."""
    (long, short), boundaries = (
        ((d.num_tokens[0], d.num_tokens[1]), d.boundaries[0])
        if d.num_tokens[0] >= d.num_tokens[1]
        else ((d.num_tokens[1], d.num_tokens[0]), d.boundaries[1])
    )
    return boundaries > 0 and short <= 32 and long > 2 * short


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)
