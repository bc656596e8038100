"""Reads JSON Lines files, with the file and the line in every error.

A module of its own, without AReaL or torch: tasks and recipes read through it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_jsonl(path: str | Path, expected: str) -> Iterator[tuple[int, dict[str, Any]]]:
    r"""Iterate over the objects of a file, lazily.

    Lines end at ``\n``; blank ones are skipped, and so is a byte order mark.

    Args:
        expected: what errors say that a line should be.

    Yields:
        The number of the line, from 1, and its object.

    Raises:
        ValueError: the file cannot be read, or a line is not UTF-8, not JSON, not an
            object, or not text.
    """
    try:
        file = open(path, "rb")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip(b" \t\r\n\xef\xbb\xbf"):
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text; {expected}.") from error
            except (ValueError, RecursionError) as error:  # also numbers too long
                raise ValueError(f"{where}: not JSON ({error}); {expected}.") from error
            if not isinstance(row, dict):
                got = type(row).__name__
                raise ValueError(f"{where}: got a JSON {got}; {expected}.")
            if rb"\u" in line and _has_half_character(row):
                raise ValueError(f"{where}: half of a \\u surrogate pair; {expected}.")
            yield number, row


def _has_half_character(row: dict[str, Any]) -> bool:
    r"""Return whether a text holds a lone ``\ud800``, which no tokenizer takes."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
