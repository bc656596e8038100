"""From a command line to a checked configuration with its data. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_dta.config.composed import Composed
from areal_dta.config.errors import ConfigError, one_line
from areal_dta.startup.compose import compose, find_config, run_dir
from areal_dta.startup.hardware import detect_hardware

if TYPE_CHECKING:
    from areal_dta.config.resolved import ResolvedRun
    from areal_dta.config.schema import DTAConfig


@dataclass(frozen=True, slots=True)
class Job:
    """A checked configuration with its data, ready to start."""

    run: ResolvedRun
    composed: Composed
    tokenizer: Any
    train_dataset: Any
    valid_dataset: Any
    num_steps: int
    notes: tuple[str, ...]
    """For the user: what was chosen, and what was switched off."""

    @property
    def config(self) -> DTAConfig:
        return self.run.config

    @property
    def run_dir(self) -> Path:
        return run_dir(self.composed)


def prepare(config_name: str, overrides: Sequence[str]) -> Job:
    """Compose, check, and load the data.

    Importing AReaL takes seconds, so what can be refused without it is refused first.

    Raises:
        ConfigError: it cannot work.
    """
    composed = compose(find_config(config_name), overrides)
    notes = []
    if composed.choices.get("hardware") == "auto":
        found = detect_hardware()
        notes.append(f"hardware=auto: {found.reason}, using hardware={found.choice}")
        composed = compose(composed.file, [*overrides, f"hardware={found.choice}"])
    if composed.choices.get("hardware") == "cpu":
        # AReaL compiles at import: seconds of start-up that nothing repays on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also where there is a GPU

    from areal_dta.config.resolved import resolve
    from areal_dta.config.schema import to_structured
    from areal_dta.startup.checks import check_config, num_steps

    run = resolve(to_structured(composed))
    config = run.config
    notes += check_config(run, composed)
    tokenizer, train, valid = _load_data(config)
    return Job(
        run=run,
        composed=composed,
        tokenizer=tokenizer,
        train_dataset=train,
        valid_dataset=valid,
        num_steps=num_steps(config, len(train)),
        notes=tuple(notes),
    )


def _load_data(config: DTAConfig) -> tuple[Any, Any, Any]:
    from areal.utils.hf_utils import load_hf_tokenizer

    from areal_dta.startup.checks import load_object

    load = load_object(config.dataset_fn, "dataset_fn")
    tokenizer = load_hf_tokenizer(config.tokenizer_path or config.actor.path)
    datasets: list[Any] = []
    for key in ("train_dataset", "valid_dataset"):
        section = getattr(config, key)
        if section is None:
            datasets.append(None)
            continue
        try:
            dataset = load(
                section.path,
                split=section.split,
                tokenizer=tokenizer,
                max_length=section.max_length,
                **section.dataset_kwargs,
            )
        except (ValueError, TypeError) as e:
            raise ConfigError(f"{key}: {one_line(e)}") from e
        datasets.append(dataset)
    return tokenizer, datasets[0], datasets[1]
