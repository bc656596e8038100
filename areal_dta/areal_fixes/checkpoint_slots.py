"""Recover checkpoints that survive a kill while they are written.

AReaL writes the weights into one directory in place, then what belongs to them file by
file. Here two slots are written in turn, and a small file that names the current one is
replaced in one step when all of its slot is on disk. It takes the space of two.

The state of more objects is saved with them, as JSON. AReaL does not save the schedule
of the learning rate either: the trainer fast-forwards it
(`areal_dta.engine.row_dispatch`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from areal.api import SaveLoadMeta
from areal.trainer import rl_trainer
from areal.utils import logging
from areal.utils.recover import RecoverHandler
from areal.utils.saver import Saver

logger = logging.getLogger("Recovery")

_SLOTS: Final = ("a", "b")
_POINTER: Final = "recover_current"


class Stateful(Protocol):
    """Object whose state can be saved as JSON and restored from it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SlotRecoverHandler(RecoverHandler):
    """AReaL's handler, writing two slots in turn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.also: dict[str, Stateful] = {}
        """Saved beside what AReaL saves, by name; loaded by `load_also`."""
        self._slot = _SLOTS[0]

    def dump(self, *args: Any, **kwargs: Any) -> None:
        """If it is time, write the other slot, then make it the current one."""
        before = self.last_step_info
        current = self._current()
        self._slot = _SLOTS[1] if current == _SLOTS[0] else _SLOTS[0]
        super().dump(*args, **kwargs)
        if self.last_step_info is before:
            return
        for name, stateful in self.also.items():
            text = json.dumps(stateful.state_dict())
            (self._directory() / f"{name}.json").write_text(text)
        replace_text(self._root() / _POINTER, self._slot)

    def load(self, *args: Any, **kwargs: Any) -> Any:
        self._slot = self._current() or _SLOTS[0]
        return super().load(*args, **kwargs)

    def load_also(self) -> None:
        """Restore ``also`` from the current slot; what it lacks starts anew."""
        for name, stateful in self.also.items():
            path = self._directory() / f"{name}.json"
            if not path.exists():
                continue
            try:
                stateful.load_state_dict(json.loads(path.read_text()))
            except ValueError as error:
                logger.warning(f"{path} is not used: {error}")

    def recover_info_path(  # type: ignore[override]  # static in AReaL
        self, experiment_name: str, trial_name: str, fileroot: str
    ) -> str:
        return str(self._directory() / "info")

    def _save_checkpoint(self, engine: Any, name: str = "default", **kept: Any) -> None:
        (self._directory() / name).mkdir(parents=True, exist_ok=True)
        engine.save(self._meta(name, not self.config.no_save_optim, **kept))

    def _load_checkpoint(self, engine: Any, name: str = "default", **_: Any) -> None:
        if not (self._directory() / name).is_dir():
            raise FileNotFoundError(
                f"the recover checkpoint lacks {self._directory() / name}"
            )
        engine.load(self._meta(name, not self.config.no_load_optim))

    def _meta(
        self,
        name: str,
        with_optim: bool,
        tokenizer: Any = None,
        processor: Any = None,
        base_model_path: str | None = None,
    ) -> SaveLoadMeta:
        return SaveLoadMeta(
            path=str(self._directory() / name),
            weight_format="dcp",
            with_optim=with_optim,
            tokenizer=tokenizer,
            processor=processor,
            base_model_path=base_model_path,
        )

    def _root(self) -> Path:
        config = self.config
        root = Saver.get_save_root(
            config.experiment_name, config.trial_name, config.fileroot
        )
        return Path(root)

    def _directory(self) -> Path:
        return self._root() / f"recover-{self._slot}"

    def _current(self) -> str | None:
        path = self._root() / _POINTER
        found = path.read_text().strip() if path.exists() else None
        return found if found in _SLOTS else None


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with open(new, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(new, path)


@contextmanager
def slots_for_recovery() -> Iterator[None]:
    """Let AReaL's PPO trainer make a `SlotRecoverHandler` in its constructor."""
    before = rl_trainer.RecoverHandler
    rl_trainer.RecoverHandler = SlotRecoverHandler
    try:
        yield
    finally:
        rl_trainer.RecoverHandler = before
