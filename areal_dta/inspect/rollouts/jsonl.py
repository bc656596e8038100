"""Reads lines of JSON, and rows of Parquet, with bounded memory.

``areal_dta.tasks.jsonl`` reads data sets that fit; here a file may be anything, so a
line has a maximum length and a file that is no text is recognised first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from areal_dta.config.composed import one_line
from areal_dta.inspect.corpus import InputError

MAX_LINE_BYTES: Final = 64 * 2**20
MAX_DOCUMENT_BYTES: Final = 512 * 2**20
"""Largest JSON document that is read as a whole."""
EXPECTED: Final = "expected JSON Lines: one object, or one list of token ids, per line"

Row = tuple[str, Any]
"""Where a row comes from (file and line), and its value."""


def read_lines(path: Path, skip: Callable[[str], None] | None = None) -> Iterator[Row]:
    r"""Iterate over the values of a JSON Lines file. Lines end at ``\n``.

    Args:
        skip: called with the message of a malformed line, which is then left out; None:
            a malformed line is an error.

    Raises:
        InputError: the file cannot be read, or a line is malformed.
    """
    with open_file(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise InputError(
                    f"{where}: longer than {MAX_LINE_BYTES >> 20} MiB; {EXPECTED}. Is "
                    "it one JSON document? Write its items to lines of their own "
                    "(jq -c '.[]')"
                )
            if b"\0" in line:
                raise InputError(
                    f"{where}: binary data; expected text ({EXPECTED}), or a file that "
                    "ends in .npz or .parquet"
                )
            if not line.strip(b" \t\r\n\xef\xbb\xbf"):
                continue
            try:
                yield where, parse(line, where)
            except InputError as error:
                if skip is None:
                    raise
                skip(str(error))


def parse(line: bytes, where: str) -> Any:
    """Return the value of a line.

    Raises:
        InputError: it is not UTF-8, not JSON, or half of a surrogate pair.
    """
    try:
        value = json.loads(line.decode("utf-8-sig"))
        if rb"\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text; {EXPECTED}") from error
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: half of a \\u surrogate pair; {EXPECTED}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: not JSON ({one_line(error)}; the line begins "
            f"{line[:40].decode('utf-8', 'replace')!r}); {EXPECTED}. "
            "--skip-malformed leaves such lines out"
        ) from error
    return value


def read_document(path: Path) -> Any:
    """Return a whole JSON document.

    Raises:
        InputError: it is too large, or not JSON.
    """
    size = path.stat().st_size
    if size > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"{path}: {size / 2**30:.1f} GiB of JSON in one document; expected at most "
            f"{MAX_DOCUMENT_BYTES >> 20} MiB, or JSON Lines, which are read one by one "
            "(jq -c '.[]' turns one into the other)"
        )
    with open_file(path) as file:
        return parse(file.read(), str(path))


def read_parquet(path: Path, columns_of: Callable[[list[str]], None]) -> Iterator[Row]:
    """Iterate over the rows of a Parquet file, in batches.

    Args:
        columns_of: called first with the names of the columns; may refuse them.

    Raises:
        InputError: pyarrow is missing, or the file is not Parquet.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise InputError(
            f"{path}: Parquet needs pyarrow (pip install pyarrow)"
        ) from error
    try:
        file = parquet.ParquetFile(path)
        columns_of(list(file.schema_arrow.names))
        number = 0
        for batch in file.iter_batches(batch_size=64):
            for row in batch.to_pylist():
                number += 1
                yield (
                    f"{path}, row {number}",
                    {k: v for k, v in row.items() if v is not None},
                )
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path}: not a Parquet file ({one_line(error)[:200]})"
        ) from error


def open_file(path: Path) -> Any:
    """Open for reading bytes. Raises InputError."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
