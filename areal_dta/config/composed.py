"""A composed configuration, and the errors of one that cannot work.

Light: the launcher composes without AReaL, which the schema needs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration, not yet checked against the schema."""

    config: DictConfig
    file: Path
    choices: dict[str, str]
    """The option taken for each config group, e.g. ``{"hardware": "cpu"}``."""
    groups: tuple[str, ...]
    """All config groups that could have been given."""
    named: frozenset[str] = frozenset()
    """Top-level keys that the file or an override names, unlike those that only config
    groups bring."""


class ConfigError(ValueError):
    """The user's command or configuration cannot work; the message is one line."""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"``, or an empty string."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def one_line(error: BaseException) -> str:
    """Return an exception's message on one line, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message: AReaL's carry whole logs."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def shorten(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."
