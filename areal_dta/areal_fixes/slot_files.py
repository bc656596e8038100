"""Files of recover checkpoints: made durable, listed with checksums, verified, found.

A slot is a directory. When all of it has been written, it is forced to disk file by
file and directory by directory, and a manifest is added that lists every file with its
size and checksum. A slot is loaded only if its manifest and all that it lists are
there, unchanged. That finds files that are cut off, empty, missing or overwritten; of
a file above `MAX_HASHED_BYTES` the checksum covers both ends, so that neither saving
nor starting has to read a large model once more.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from areal.api import StepInfo
from areal.api.cli_args import RecoverConfig
from areal.utils import logging
from areal.utils.recover import RecoverInfo
from areal.utils.saver import Saver

from areal_dta.config.composed import ConfigError

logger = logging.getLogger("Recovery")

SLOTS: Final = ("a", "b")
POINTER: Final = "recover_current"
MANIFEST: Final = "manifest.json"
INFO_PARTS: Final = ("saver", "evaluator", "stats_logger", "checkpoint", "dataloader")
MAX_HASHED_BYTES: Final = 2**26
_END_BYTES: Final = 2**22  # of a larger file, at its start and at its end
_FORMAT: Final = "areal_dta.slot/1"
_OLD_DATALOADER: Final = "dataloader_info.pkl"  # of 0.1.0, and AReaL's
_DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class DamagedCheckpoint(Exception):
    """A slot cannot be loaded; the message names the file and what is wrong."""


class RecoverError(ConfigError):
    """There are recover checkpoints, and none can be loaded; says what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A recover checkpoint whose files are whole."""

    directory: Path
    """The slot; the parent of all where AReaL wrote it (0.1.0: SFT, DPO, RW)."""
    info: RecoverInfo
    is_areal_layout: bool = False

    def weights(self, name: str) -> Path:
        """Return the directory of an engine's weights and optimizer."""
        path = self.directory / name
        return path / "recover_checkpoint" if self.is_areal_layout else path

    @property
    def num_steps(self) -> int:
        """Number of training steps done."""
        return int(self.info.last_step_info.global_step) + 1


def recover_root(config: RecoverConfig) -> Path:
    """Return the directory that holds the slots and the pointer."""
    names = config.experiment_name, config.trial_name, config.fileroot
    return Path(Saver.get_save_root(*names))


def find_checkpoint(config: RecoverConfig) -> Checkpoint | None:
    """Return the checkpoint to continue from; None where a run has none yet.

    The pointer's slot is taken. When it is damaged, the other one is, with a warning
    that says what was wrong.

    Raises:
        RecoverError: there are checkpoints, but none can be loaded.
    """
    if config.mode in ("disabled", "off"):
        return None
    root = recover_root(config)
    pointer = root / POINTER
    text = pointer.read_text(errors="replace").strip() if pointer.exists() else None
    slots = [root / f"recover-{slot}" for slot in SLOTS]
    # No slot was ever whole: a new run, or one that was killed during its first
    # checkpoint, or one that continues what 0.1.0 wrote for SFT, DPO or rewards.
    if text is None and not any((slot / MANIFEST).exists() for slot in slots):
        if (root / "recover_info").exists():
            try:
                return Checkpoint(root, _read_info(root / "recover_info"), True)
            except DamagedCheckpoint as error:
                refuse(root, [str(error)])
        if any(slot.exists() for slot in slots):
            logger.warning(
                f"the first recover checkpoint in {root} was never finished: the run "
                "starts from its first step"
            )
        else:
            logger.info(f"no recover checkpoint in {root} yet: a new run")
        return None
    # The pointer's slot, else the one that is further.
    problems = []
    if text in SLOTS:
        slots.sort(key=lambda slot: slot.name != f"recover-{text}")
    else:
        what = "is missing" if text is None else f"holds {text[:20]!r}, not a or b"
        problems.append(f"{pointer} {what}")
    found: list[Checkpoint] = []
    for slot in slots:
        if found and text in SLOTS:
            break
        try:
            found.append(_read_slot(slot, is_current=slot.name == f"recover-{text}"))
        except DamagedCheckpoint as error:
            problems.append(str(error))
    if not found:
        refuse(root, problems)
    best = max(found, key=lambda checkpoint: checkpoint.num_steps)
    for problem in problems:
        logger.warning(
            f"damaged recover checkpoint: {problem}. The run continues from "
            f"{best.directory}, saved after step {best.num_steps}"
        )
    return best


def write_manifest(slot: Path, global_step: int) -> None:
    """Force all files of a slot to disk, then list them in its manifest."""
    files = {}
    directories = [slot]
    for path in sorted(slot.rglob("*")):
        if path.is_dir():
            directories.append(path)
        elif path.name != MANIFEST:
            _sync(path)
            files[str(path.relative_to(slot))] = _describe(path)
    for directory in reversed(directories):
        _sync(directory)
    content = {"format": _FORMAT, "global_step": global_step, "files": files}
    replace_text(slot / MANIFEST, json.dumps(content, indent=1))


def verify_manifest(slot: Path) -> int:
    """Compare a slot with its manifest; return the step that it was saved after.

    Raises:
        DamagedCheckpoint: something is missing or differs.
    """
    content = read_json(slot / MANIFEST)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise DamagedCheckpoint(f"{slot / MANIFEST} is not of the format {_FORMAT}")
    for name, expected in content["files"].items():
        path = slot / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing")
        if (size := path.stat().st_size) != expected["bytes"]:
            raise DamagedCheckpoint(
                f"{path} has {size} bytes, {expected['bytes']} were written"
            )
        if _describe(path) != expected:
            raise DamagedCheckpoint(f"{path} was changed: its checksum differs")
    return int(content["global_step"])


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        DamagedCheckpoint: it is missing, empty or cut off.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    _sync(new)
    os.replace(new, path)
    _sync(path.parent)


def disk_trouble(error: BaseException) -> str | None:
    """Return what a disk complains of (it is full, say); None for other errors.

    Errors of workers arrive as text.
    """
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return os.strerror(error.errno)
    texts = [os.strerror(number) for number in _DISK_ERRORS]
    return next((text for text in texts if text in str(error)), None)


def refuse(
    directory: Path, problems: list[str], cause: BaseException | None = None
) -> NoReturn:
    """Raise a `RecoverError` that says what to do."""
    raise RecoverError(
        f"no recover checkpoint can be loaded: {'; '.join(problems)}. Restore "
        f"{directory} from a copy, or start anew: set another trial_name, or "
        "recover.mode=off, or move that directory away"
    ) from cause


def _read_slot(slot: Path, is_current: bool) -> Checkpoint:
    # 0.1.0 wrote no manifest, and moved the pointer when all had been written.
    has_manifest = (slot / MANIFEST).exists()
    is_old = not has_manifest and (slot / "info" / _OLD_DATALOADER).exists()
    if is_old and not is_current:
        raise DamagedCheckpoint(f"{slot} has no {MANIFEST}: it may be half written")
    step = None if is_old else verify_manifest(slot)
    info = _read_info(slot / "info")
    if step not in (None, info.last_step_info.global_step):
        raise DamagedCheckpoint(f"{slot / 'info'} is not of step {step}")
    return Checkpoint(slot, info)


def _read_info(directory: Path) -> RecoverInfo:
    parts = {part: directory / f"{part}_info.json" for part in ("step", *INFO_PARTS)}
    old = directory / _OLD_DATALOADER
    has_old = old.exists() and not parts["dataloader"].exists()
    if has_old:
        del parts["dataloader"]
    read = {f"{part}_info": read_json(path) for part, path in parts.items()}
    if has_old:
        read["dataloader_info"] = _read_plain_pickle(old)
    try:
        return RecoverInfo(last_step_info=StepInfo(**read.pop("step_info")), **read)
    except TypeError as error:
        raise DamagedCheckpoint(f"{parts['step']}: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, dicts, numbers and text; refuses whatever names code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data")


def _read_plain_pickle(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            state = _PlainUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    return state[0] if isinstance(state, list) else state  # of the only controller


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems do not know it for directories
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def _describe(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= MAX_HASHED_BYTES:
            digest.update(file.read())
            return {"bytes": size, "sha256": digest.hexdigest()}
        digest.update(file.read(_END_BYTES))
        file.seek(-_END_BYTES, os.SEEK_END)
        digest.update(file.read())
    return {"bytes": size, "sha256_of_ends": digest.hexdigest()}
