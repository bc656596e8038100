"""Finds out what a file holds, and reads it as sequences, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from areal_dta.inspect.corpus import InputError, Record
from areal_dta.inspect.rollouts import arrays, chats, jsonl, tau2_results
from areal_dta.inspect.rollouts.text import (
    DEFAULT_TOKENIZER,
    TextTokenizer,
    load_tokenizer,
)

FORMATS: Final = ("areal", "chat", "answers", "tau2", "tokens")
"""``areal``: texts dumped by ``rollout.dump_to_file``; ``chat``: messages; ``answers``:
a question with several; ``tau2``: episodes; ``tokens``: token ids."""

_TEXT_SUFFIXES: Final = (".jsonl", ".json", ".ndjson", ".txt", "")
_MAX_NOTES = 8


@dataclass(slots=True)
class Reader:
    """Reads files; loads a tokenizer when the first text is met."""

    tokenizer_name: str | None = None
    format: str | None = None
    export: str = "individual"
    skip_malformed: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TextTokenizer | None = None
    notes: list[str] = field(default_factory=list)
    """What the report should say about the reading."""
    formats: dict[str, str] = field(default_factory=dict)
    """Format by file."""
    num_malformed: int = 0
    _dumped: list[int] = field(default_factory=lambda: [0, 0])
    _tokenizers: dict[str, str] = field(default_factory=dict)

    def read(self, paths: Sequence[Path]) -> Iterator[Record]:
        """Yield the sequences of files and folders, in order.

        Raises:
            InputError: a file is missing, empty, of an unknown format, or malformed.
        """
        if self.tokenizer_name is not None:
            self._text()  # what does not exist is told before anything is read
        for path in self._files(paths):
            records = self._read_file(path)
            first = next(records, None)
            if first is None:
                raise InputError(
                    f"{path}: no sequence in it; expected rollouts ("
                    f"{', '.join(FORMATS)}), one per line"
                )
            yield from itertools.chain([first], records)
        differing, num = self._dumped[0], sum(self._dumped)
        if differing:
            self._note(
                f"{differing:,} of {num:,} dumped texts have another number of tokens "
                "when they are encoded again: sampled ids are not always those of the "
                "text, or --tokenizer is not the one that wrote them"
            )

    def _files(self, paths: Sequence[Path]) -> Iterator[Path]:
        for path in paths:
            if path.is_dir():
                found = sorted(path.rglob("*.jsonl"))
                if not found:
                    raise InputError(f"{path}: a folder without .jsonl files")
                yield from found
            elif not path.exists():
                raise InputError(f"{path}: no such file")
            else:
                yield path

    def _read_file(self, path: Path) -> Iterator[Record]:
        suffix = path.suffix.lower()
        if suffix == ".npz":
            self.formats[str(path)] = "tokens (NPZ)"
            return arrays.read_npz(path)
        if suffix in (".parquet", ".pq"):
            return self._read_rows(path, jsonl.read_parquet(path, lambda names: None))
        if suffix not in _TEXT_SUFFIXES:
            raise InputError(
                f"{path}: unknown kind of file {suffix!r}; expected .jsonl, .json, "
                ".npz or .parquet, or a folder of .jsonl"
            )
        if path.stat().st_size == 0:
            raise InputError(f"{path}: an empty file; expected rollouts, one per line")
        if suffix == ".json":
            return self._read_rows(path, self._document(path))
        skip = self._skip if self.skip_malformed else None
        return self._read_rows(path, jsonl.read_lines(path, skip))

    def _document(self, path: Path) -> Iterator[jsonl.Row]:
        document = jsonl.read_document(path)
        if tau2_results.is_results(document):
            yield from tau2_results.results_rows(str(path), document)
        elif isinstance(document, list) and document and not _is_ids(document):
            for i, row in enumerate(document):
                yield f"{path}, item {i}", row
        else:
            yield str(path), document

    def _read_rows(self, path: Path, rows: Iterator[jsonl.Row]) -> Iterator[Record]:
        format = self.format
        for where, row in rows:
            if tau2_results.is_results(row):  # a results file on one line
                yield from self._read_rows(path, tau2_results.results_rows(where, row))
                continue
            try:
                format = format or detect(where, row)
                self.formats.setdefault(str(path), format)
                self._check_tokenizer(where, row)
                yield from self._records(where, row, format)
            except InputError as error:
                if not self.skip_malformed or str(path) not in self.formats:
                    raise
                self._skip(str(error))
            except (AttributeError, KeyError, TypeError, StopIteration) as error:
                # A value of another type than the format has it.
                raise InputError(
                    f"{where}: not a row of format {format} ({type(error).__name__}: "
                    f"{error}); --format chooses among {', '.join(FORMATS)}"
                ) from error

    def _records(self, where: str, row: Any, format: str) -> Iterator[Record]:
        if format == "tokens":
            if not isinstance(row, list | Mapping):
                raise InputError(f"{where}: {str(row)!r:.40}; {jsonl.EXPECTED}")
            return arrays.token_records(where, row)
        if not isinstance(row, Mapping):
            got = type(row).__name__
            raise InputError(f"{where}: a JSON {got}; expected an object ({format})")
        text = self._text()
        match format:
            case "areal" if chats.is_areal_dump(row):
                return chats.dumped_records(where, row, text, self._count_dumped)
            case "chat" if chats.is_chat(row):
                return chats.chat_records(where, row, text, self.export)
            case "answers" if chats.is_answers(row):
                return chats.answer_records(where, row, text)
            case "tau2" if tau2_results.is_episode(row):
                return tau2_results.episode_records(
                    where, row, text, self.export, self._note
                )
        raise InputError(
            f"{where}: keys {', '.join(map(str, list(row)[:8])) or 'none'} are not "
            f"those of format {format}, as the file began; split the file, or leave "
            "such lines out with --skip-malformed"
        )

    def _text(self) -> TextTokenizer:
        if self.tokenizer is None:
            name = self.tokenizer_name or DEFAULT_TOKENIZER
            try:
                self.tokenizer = load_tokenizer(name, self.template_arguments)
            except ValueError as error:
                raise InputError(str(error)) from error
            if self.tokenizer_name is None:
                self._note(
                    "texts are encoded by Qwen3's tokenizer; --tokenizer names another"
                )
        return self.tokenizer

    def _check_tokenizer(self, where: str, row: Any) -> None:
        """Refuse token ids of several tokenizers, where rows name them."""
        name = row.get("tokenizer") if isinstance(row, Mapping) else None
        if not isinstance(name, str):
            return
        self._tokenizers.setdefault(name, where)
        if len(self._tokenizers) > 1:
            (one, first), (other, second), *_ = self._tokenizers.items()
            raise InputError(
                f"mixed tokenizers: {first} has {one!r}, {second} has {other!r}; ids "
                "of different tokenizers share nothing: inspect the files apart"
            )

    def _count_dumped(self, is_same: bool) -> None:
        self._dumped[is_same] += 1

    def _skip(self, message: str) -> None:
        self.num_malformed += 1
        if self.num_malformed == 1:
            self._note(f"a malformed line is left out: {message}")

    def _note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < _MAX_NOTES:
            self.notes.append(text)


def detect(where: str, row: Any) -> str:
    """Return the format of a file from its first row.

    Raises:
        InputError: it is none of FORMATS.
    """
    tests: dict[str, Callable[[Any], bool]] = {
        "areal": chats.is_areal_dump,
        "tau2": tau2_results.is_episode,
        "chat": chats.is_chat,
        "answers": chats.is_answers,
        "tokens": arrays.has_tokens,
    }
    if isinstance(row, list):
        return "tokens"
    if isinstance(row, Mapping):
        for name, is_format in tests.items():
            if is_format(row):
                return name
    got = type(row).__name__
    if isinstance(row, Mapping):
        got = f"keys {', '.join(map(str, list(row)[:8])) or 'none'}"
    raise InputError(
        f"{where}: unknown format ({got}); expected messages (chat), prompt, "
        "completion and seqlen (areal), question and solutions (answers), domain, "
        "task_id and messages (tau2), or input_ids (tokens); see docs/inspect.md"
    )


def _is_ids(row: Sequence[Any]) -> bool:
    return all(isinstance(i, int) and not isinstance(i, bool) for i in row[:16])
