"""Engines and counters of a run that saves recover checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from areal.api import FinetuneSpec, StepInfo
from areal.api.cli_args import RecoverConfig

from areal_dta.areal_fixes import slot_files
from areal_dta.areal_fixes.checkpoint_slots import SlotRecoverHandler
from areal_dta.areal_fixes.slot_files import find_checkpoint, recover_root


class Engine:
    """Saves its weight as a file."""

    def __init__(self, weight: str = "") -> None:
        self.weight = weight
        self.error: Exception | None = None
        self.version = self.num_lr_steps = 0

    def save(self, meta: Any) -> None:
        (Path(meta.path) / "weight").write_text(self.weight[:1])
        if self.error is not None:
            raise self.error
        (Path(meta.path) / "weight").write_text(self.weight)

    def load(self, meta: Any) -> None:
        self.weight = (Path(meta.path) / "weight").read_text()

    def step_lr_scheduler(self) -> None:
        self.num_lr_steps += 1

    def set_version(self, version: int) -> None:
        self.version = version


class Part:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def recover_config(root: Path, mode: str = "on") -> RecoverConfig:
    return RecoverConfig(
        experiment_name="e", trial_name="t", fileroot=str(root), mode=mode, freq_steps=1
    )


def handler(root: Path, cls: type[Any] = SlotRecoverHandler, **kwargs: Any) -> Any:
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1)
    return cls(recover_config(root), spec, **kwargs)


def dump(slots: Any, engine: Engine, step: int, **more: Engine) -> None:
    """Save after a step, which counts from 0, and publish its metrics."""
    parts = [Part(step) for _ in range(4)]
    info = StepInfo(epoch=0, epoch_step=step, global_step=step, steps_per_epoch=8)
    slots.dump({"default": engine, **more}, info, *parts)
    if isinstance(slots, SlotRecoverHandler):
        slots.publish()


def load(root: Path, cls: type[Any] = SlotRecoverHandler) -> tuple[Any, Engine, Part]:
    engine, parts = Engine(), [Part() for _ in range(4)]
    kwargs = {}
    if cls is SlotRecoverHandler:
        kwargs = {"checkpoint": find_checkpoint(recover_config(root))}
    info = handler(root, cls, **kwargs).load({"default": engine}, *parts)
    return info, engine, parts[3]


def saved(root: Path, num_steps: int = 2) -> Path:
    """Save after each of some steps; return the directory of the slots."""
    slots = handler(root)
    for step in range(num_steps):
        dump(slots, Engine(f"weight {step}"), step)
    return recover_root(recover_config(root))


def current(slots: Path) -> Path:
    return slots / f"recover-{(slots / 'recover_current').read_text()}"


def heard(caplog: pytest.LogCaptureFixture) -> Any:
    """Let the records of AReaL's logger reach the fixture, from none on."""
    caplog.clear()
    return _Heard(caplog)


class _Heard:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._handler = caplog.handler
        self._logger = slot_files.logger

    def __enter__(self) -> None:
        self._logger.addHandler(self._handler)
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)

    def __exit__(self, *args: Any) -> None:
        self._logger.removeHandler(self._handler)
        self._logger.setLevel(self._level)
