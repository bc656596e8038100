"""Token ids in lists and arrays: JSON objects, Parquet rows and NPZ files.

NPZ members are read piece by piece, so a file may be larger than the memory.
"""

# S = padded width

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_dta.config.composed import one_line
from areal_dta.inspect.corpus import MAX_TOKEN_ID, InputError, Record

TOKEN_KEYS: Final = ("input_ids", "token_ids", "tokens", "ids")
_PROMPT_KEYS: Final = ("prompt_ids", "prompt_token_ids", "prompt_tokens")
_OUTPUT_KEYS: Final = (
    "completion_ids",
    "response_ids",
    "output_ids",
    "completion_tokens",
    "response_tokens",
    "output_tokens",
)
_EPISODE_KEYS: Final = ("episode", "episode_id", "session_id", "trajectory_id")
_GROUP_KEYS: Final = ("group", "prompt_id", "task_id", "problem_id")


def has_tokens(row: Any) -> bool:
    """Return whether a row is a list of token ids, or holds one."""
    if isinstance(row, list):
        return not row or not isinstance(row[0], Mapping | str)
    return bool(
        set(row) & set(TOKEN_KEYS)
        and not isinstance(row[next(k for k in TOKEN_KEYS if k in row)], str | int)
    ) or bool(set(row) & set(_PROMPT_KEYS) and set(row) & set(_OUTPUT_KEYS))


def token_records(where: str, row: Any) -> Iterator[Record]:
    """Yield the sequence of a row.

    Raises:
        InputError: it holds no token ids, or the mask does not fit them.
    """
    if isinstance(row, list):
        yield Record(_ids(where, "the line", row), where)
        return
    prompt = next((row[k] for k in _PROMPT_KEYS if k in row), None)
    output = next((row[k] for k in _OUTPUT_KEYS if k in row), None)
    if isinstance(prompt, list) and isinstance(output, list):
        start = len(prompt)
        tokens = _ids(where, "prompt and completion", [*prompt, *output])
        spans: tuple[tuple[int, int], ...] | None = ((start, len(tokens)),)
    else:
        key = next((k for k in TOKEN_KEYS if k in row), None)
        if key is None:
            raise InputError(
                f"{where}: keys {', '.join(list(row)[:8])}; expected one of "
                f"{', '.join(TOKEN_KEYS)}"
            )
        tokens = _ids(where, key, row[key])
        kept = np.ones(len(tokens), bool)
        if "attention_mask" in row:
            kept = _mask(where, "attention_mask", row["attention_mask"], len(tokens))
        spans = None
        if "loss_mask" in row:
            mask = _mask(where, "loss_mask", row["loss_mask"], len(tokens))
            spans = spans_of(mask[kept])
        tokens = tokens[kept]
    yield Record(tokens, where, spans, *identities(row))


def identities(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the episode and the group that a row names; empty where it does not."""
    return (
        next((str(row[k]) for k in _EPISODE_KEYS if k in row), ""),
        next((str(row[k]) for k in _GROUP_KEYS if k in row), ""),
    )


def spans_of(mask: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Return the runs of a mask as ranges."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def _ids(where: str, key: str, values: Any) -> NDArray[np.int32]:
    if isinstance(values, list | np.ndarray) and not len(values):
        raise InputError(f"{where}: {key} is empty; expected at least one token id")
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        array = np.zeros((0, 0))
    if array.ndim == 2 and len(array) == 1:  # a batch of one
        array = array[0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shape = f"an array {array.shape} of {array.dtype}"
        what = type(values).__name__ if not isinstance(values, list) else shape
        raise InputError(
            f"{where}: {key} is {what}; expected a flat list of whole numbers"
        )
    if array.min() < 0 or array.max() > MAX_TOKEN_ID:
        wrong = array[(array < 0) | (array > MAX_TOKEN_ID)][0]
        raise InputError(
            f"{where}: {key} holds {wrong}; expected ids from 0 to {MAX_TOKEN_ID}. Is "
            "it padded with negative ids? Cut the padding or pass attention_mask"
        )
    return array.astype(np.int32)


def _mask(where: str, key: str, values: Any, length: int) -> NDArray[np.bool_]:
    try:
        mask = np.asarray(values, np.float64).reshape(-1)
    except (ValueError, TypeError):
        mask = np.zeros(0)
    if len(mask) != length:
        raise InputError(
            f"{where}: {key} has {len(mask)} entries for {length} tokens; expected one "
            "per token"
        )
    return mask != 0


def read_npz(path: Path) -> Iterator[Record]:
    """Yield the sequences of an NPZ file.

    It holds ``tokens`` with ``offsets`` [N + 1], as recorded sequences and skipped
    steps do, or ``input_ids`` [N, S] with ``attention_mask``; and ``loss_mask``.

    Raises:
        InputError: it is not such a file.
    """
    try:
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(path))
            names = [n.removesuffix(".npy") for n in archive.namelist()]
            members = {
                name: _Member(path, name, stack.enter_context(archive.open(f)))
                for name, f in zip(names, archive.namelist(), strict=True)
                if name in (*TOKEN_KEYS, "offsets", "loss_mask", "attention_mask")
            }
            key = next((k for k in TOKEN_KEYS if k in members), None)
            if key is None:
                raise InputError(
                    f"{path}: arrays {', '.join(names[:8]) or 'none'}; expected tokens "
                    "and offsets, or input_ids and attention_mask"
                )
            if len(members[key].shape) == 1:
                yield from _flat(path, members, key)
            else:
                yield from _padded(path, members, key)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path}: not a readable NPZ file ({one_line(error)}); expected what "
            "numpy.savez writes, without pickled objects"
        ) from error


def _flat(path: Path, members: Mapping[str, _Member], key: str) -> Iterator[Record]:
    if "offsets" not in members:
        raise InputError(
            f"{path}: {key} is one flat array without offsets; expected offsets "
            "[sequences + 1], from 0 to the number of tokens"
        )
    offsets = members["offsets"].take(int(np.prod(members["offsets"].shape)))
    total = members[key].shape[0]
    rises = len(offsets) and offsets[0] == 0 and bool((np.diff(offsets) > 0).all())
    if not rises or offsets[-1] != total:
        raise InputError(
            f"{path}: offsets do not rise from 0 to {total}, the number of tokens"
        )
    for i, length in enumerate(np.diff(offsets).tolist()):
        where = f"{path}, sequence {i}"
        tokens = _ids(where, key, members[key].take(length))
        spans = None
        if "loss_mask" in members:
            spans = spans_of(members["loss_mask"].take(length) != 0)
        yield Record(tokens, where, spans)


def _padded(path: Path, members: Mapping[str, _Member], key: str) -> Iterator[Record]:
    shape = members[key].shape
    for name in ("attention_mask", "loss_mask"):
        if name in members and members[name].shape != shape:
            raise InputError(
                f"{path}: {name} has shape {members[name].shape}, {key} {shape}; "
                "expected the same"
            )
    if len(shape) != 2:
        raise InputError(f"{path}: {key} has shape {shape}; expected [sequences, S]")
    for i in range(shape[0]):
        where = f"{path}, row {i}"
        row = {name: members[name].take(shape[1]) for name in members}
        row.pop("offsets", None)
        row[key] = row[key].astype(np.int64)
        if "attention_mask" in row:
            row[key] = np.where(row["attention_mask"] != 0, row[key], 0)
        yield from token_records(where, row)


class _Member:
    """An array of an NPZ file, read from its start."""

    def __init__(self, path: Path, name: str, stream: Any) -> None:
        version = np.lib.format.read_magic(stream)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise InputError(f"{path}: {name} has NPY version {version}; expected 1, 2")
        self.shape, is_fortran, self._dtype = read(stream)
        if self._dtype.kind not in "iubf" or (is_fortran and len(self.shape) > 1):
            raise InputError(
                f"{path}: {name} is {self._dtype}{' in Fortran order' * is_fortran}; "
                "expected numbers in C order"
            )
        self._stream = stream

    def take(self, count: int) -> NDArray[Any]:
        """Return the next ``count`` values."""
        size = count * self._dtype.itemsize
        data = self._stream.read(size)
        if len(data) != size:
            raise ValueError("the file ends early")
        return np.frombuffer(data, self._dtype)
