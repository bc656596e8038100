"""Recover checkpoints that survive a kill, a damaged file and a full disk.

AReaL writes the weights into one directory in place, then what belongs to them file by
file, restores the actor alone and not its LR schedule, and starts from step 0 when it
cannot read what it wrote. Here two slots are written in turn (`slot_files`), and a
small file, the pointer, is replaced in one step to name the current one, once the
step's metrics have been written too. docs/recovery.md has the files and the rules.

AReaL's own file of the data loader's state is a pickle; here it is JSON. Those that
0.1.0 wrote are read without calling anything that they name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from areal.api import SaveLoadMeta, StepInfo
from areal.api.cli_args import RecoverConfig
from areal.infra.scheduler.exceptions import SchedulerError
from areal.trainer import dpo_trainer, rl_trainer, rw_trainer, sft_trainer
from areal.utils.recover import RecoverHandler, RecoverInfo

from areal_dta.areal_fixes.slot_files import (
    INFO_PARTS,
    POINTER,
    SLOTS,
    Checkpoint,
    disk_trouble,
    logger,
    recover_root,
    refuse,
    replace_text,
    write_manifest,
)
from areal_dta.areal_fixes.training_engines import RecoverableEngine
from areal_dta.config.composed import one_line


class Stateful(Protocol):
    """Object whose state can be saved as JSON and restored from it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SlotRecoverHandler(RecoverHandler):
    """AReaL's handler, writing two slots in turn.

    Args:
        checkpoint: what `find_checkpoint` found, to be loaded.
        more_engines: returns engines to restore beside the one that AReaL gives, by
            the names under which it saves them.
    """

    def __init__(
        self,
        config: RecoverConfig,
        ft_spec: Any,
        checkpoint: Checkpoint | None = None,
        more_engines: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        super().__init__(config, ft_spec)
        self.also: dict[str, Stateful] = {}
        """Saved beside what AReaL saves, by name; loaded by `load_also`."""
        self.num_failed = 0
        """Number of checkpoints that could not be written."""
        self._checkpoint, self._more_engines = checkpoint, more_engines
        self._kept: str | None = None  # the slot that is whole: not written to
        if checkpoint is not None and not checkpoint.is_areal_layout:
            self._kept = checkpoint.directory.name.removeprefix("recover-")
        self._written: str | None = None  # the slot that `publish` makes current

    def dump(
        self,
        engine: Any,
        step_info: StepInfo,
        saver: Any,
        evaluator: Any,
        stats_logger: Any,
        dataloader: Any,
        tokenizer: Any = None,
        processor: Any = None,
        base_model_path: str | None = None,
    ) -> None:
        """If it is time, write the slot that is not current; `publish` makes it so.

        A disk that is full, or fails, costs this checkpoint: the current slot stays.
        """
        if self.config.mode in ("disabled", "off"):
            return
        self._ensure_recover_supported(engine)
        is_last_of_epoch = step_info.epoch_step == self.ft_spec.steps_per_epoch - 1
        if not self.freq_ctl.check(epochs=int(is_last_of_epoch), steps=1):
            return
        self.last_step_info = step_info
        states = (saver, evaluator, stats_logger, self.freq_ctl, dataloader)
        info = {
            part: stateful.state_dict()
            for part, stateful in zip(INFO_PARTS, states, strict=True)
        }
        root = recover_root(self.config)
        slot = SLOTS[1] if self._kept == SLOTS[0] else SLOTS[0]
        directory = root / f"recover-{slot}"
        try:
            shutil.rmtree(directory, ignore_errors=True)
            for name, each in self._normalize_recover_engines(engine).items():
                path = directory / name
                path.mkdir(parents=True)
                files = dict(
                    tokenizer=tokenizer,
                    processor=processor,
                    base_model_path=base_model_path,
                )
                each.save(_meta(path, not self.config.no_save_optim, **files))
            (directory / "info").mkdir()
            for part, state in (("step", asdict(step_info)), *info.items()):
                text = json.dumps(state, indent=1)
                (directory / "info" / f"{part}_info.json").write_text(text)
            for name, stateful in self.also.items():
                text = json.dumps(stateful.state_dict())
                (directory / f"{name}.json").write_text(text)
            write_manifest(directory, step_info.global_step)
        except (OSError, SchedulerError) as error:
            trouble = disk_trouble(error)
            if trouble is None:
                raise
            shutil.rmtree(directory, ignore_errors=True)  # its space may be needed
            self.num_failed += 1
            logger.warning(
                f"{trouble}: no recover checkpoint after step "
                f"{step_info.global_step + 1} ({directory}); the one before stays. "
                f"{self.num_failed} of this process have failed"
            )
        else:
            self._written = slot

    def publish(self) -> None:
        """Make the slot that was written last the current one, if there is a new one.

        Called when the step's metrics are on disk, so that a run that continues from
        the slot lacks none of them.
        """
        if self._written is not None:
            replace_text(recover_root(self.config) / POINTER, self._written)
            self._kept, self._written = self._written, None

    def load(
        self,
        engine: Any,
        saver: Any,
        evaluator: Any,
        stats_logger: Any,
        dataloader: Any,
        inference_engine: Any = None,
        weight_update_meta: Any = None,
        inference_engine_update_from: str = "default",
    ) -> RecoverInfo | None:
        """Restore all engines, their LR schedules and versions, and AReaL's counters.

        Raises:
            RecoverError: an engine cannot load the checkpoint.
        """
        checkpoint = self._checkpoint
        if checkpoint is None:
            return None
        engines = {**self._normalize_recover_engines(engine), **self._more_engines()}
        info, version = checkpoint.info, checkpoint.num_steps
        logger.info(f"continuing from {checkpoint.directory}, after step {version}")
        for part, stateful in (
            (info.saver_info, saver),
            (info.checkpoint_info, self.freq_ctl),
            (info.evaluator_info, evaluator),
            (info.stats_logger_info, stats_logger),
            (info.dataloader_info, dataloader),
        ):
            stateful.load_state_dict(part)
        for name, each in engines.items():
            path = checkpoint.weights(name)
            if not path.is_dir():
                refuse(path.parent, [f"{path} is missing: the {name}'s weights"])
            try:
                each.load(_meta(path, not self.config.no_load_optim))
            except Exception as error:
                message = f"{path} cannot be loaded: {one_line(error)}"
                refuse(path.parent, [message], error)
            _advance_lr_scheduler(each, version)
        if inference_engine is not None:
            updating = engines[inference_engine_update_from]
            meta = weight_update_meta.with_version(version)
            updating.connect_engine(inference_engine, meta)
            inference_engine.pause()
            updating.update_weights(meta)
            inference_engine.resume()
            inference_engine.set_version(version)
        for each in engines.values():
            each.set_version(version)
        return info

    def load_also(self) -> None:
        """Restore ``also`` from the checkpoint; what it lacks starts anew."""
        if self._checkpoint is None:
            return
        for name, stateful in self.also.items():
            path = self._checkpoint.directory / f"{name}.json"
            if not path.exists():
                continue
            try:
                stateful.load_state_dict(json.loads(path.read_text()))
            except ValueError as error:
                logger.warning(f"{path} is not used: {error}")


@contextmanager
def slots_for_recovery(
    checkpoint: Checkpoint | None = None,
    more_engines: Callable[[], Mapping[str, Any]] = dict,
) -> Iterator[None]:
    """Let AReaL's trainers make a `SlotRecoverHandler` in their constructors."""
    modules: tuple[Any, ...] = rl_trainer, sft_trainer, dpo_trainer, rw_trainer
    before = [module.RecoverHandler for module in modules]
    for module in modules:
        module.RecoverHandler = partial(
            SlotRecoverHandler, checkpoint=checkpoint, more_engines=more_engines
        )
    try:
        yield
    finally:
        for module, handler in zip(modules, before, strict=True):
            module.RecoverHandler = handler


def _advance_lr_scheduler(controller: Any, num_steps: int) -> None:
    """Fast-forward the LR schedule of an engine that was just created."""
    engine = getattr(controller, "train_engine", None)
    if isinstance(engine, type) and issubclass(engine, RecoverableEngine):
        controller._custom_function_call("advance_lr_scheduler", num_steps)
        return
    for _ in range(num_steps):
        controller.step_lr_scheduler()


def _meta(path: Path, with_optim: bool, **files: Any) -> SaveLoadMeta:
    names = ("tokenizer", "processor", "base_model_path")
    return SaveLoadMeta(
        path=str(path),
        weight_format="dcp",
        with_optim=with_optim,
        **{name: files.get(name) for name in names},
    )
