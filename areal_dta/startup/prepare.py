"""Turn a command line into a checked run with its data. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_dta.config.composed import Composed, ConfigError, one_line, shorten
from areal_dta.startup.compose import compose, detect_hardware, find_config, run_dir

if TYPE_CHECKING:
    from areal_dta.config.resolved import ResolvedRun
    from areal_dta.config.schema import DTAConfig


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A checked run with its data, ready to start."""

    resolved: ResolvedRun
    composed: Composed
    tokenizer: Any
    train_dataset: Any
    valid_dataset: Any
    num_steps: int
    notes: tuple[str, ...]
    """What was chosen, and what was switched off; shown to the user."""

    @property
    def config(self) -> DTAConfig:
        return self.resolved.config

    @property
    def run_dir(self) -> Path:
        return run_dir(self.composed)


def prepare(config_name: str, overrides: Sequence[str]) -> PreparedRun:
    """Compose and check a configuration, and load its data.

    Raises:
        ConfigError: it cannot work.
    """
    # Importing AReaL takes seconds, so what can be refused without it comes first.
    composed = compose(find_config(config_name), overrides)
    notes = []
    if composed.choices.get("hardware") == "auto":
        choice, reason = detect_hardware()
        notes.append(f"hardware=auto: {reason}, using hardware={choice}")
        composed = compose(composed.file, [*overrides, f"hardware={choice}"])
    if composed.choices.get("hardware") == "cpu":
        # AReaL compiles at import: seconds of start-up that nothing repays on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also on a machine with a GPU

    from areal.utils.hf_utils import load_hf_tokenizer

    from areal_dta.config.resolved import resolve
    from areal_dta.config.schema import to_structured
    from areal_dta.startup.check_models import check_no_code
    from areal_dta.startup.checks import check_run, num_steps

    resolved = resolve(to_structured(composed))
    config = resolved.config
    notes += check_run(resolved, composed)
    path = config.tokenizer_path or config.actor.path
    try:
        if not config.trust_remote_code:
            check_no_code(path, "tokenizer_path", is_model=False)
        tokenizer = load_hf_tokenizer(path)
    except ConfigError:
        raise
    except (OSError, ValueError) as e:
        reason = shorten(one_line(e), 200)
        raise ConfigError(f"tokenizer_path={path} cannot be loaded: {reason}") from e
    train_dataset = _load_dataset(config, "train_dataset", tokenizer)
    return PreparedRun(
        resolved=resolved,
        composed=composed,
        tokenizer=tokenizer,
        train_dataset=train_dataset,
        valid_dataset=_load_dataset(config, "valid_dataset", tokenizer),
        num_steps=num_steps(config, len(train_dataset)),
        notes=tuple(notes),
    )


def _load_dataset(config: DTAConfig, key: str, tokenizer: Any) -> Any:
    from areal_dta.config.schema import load_object

    section = getattr(config, key)
    if section is None:
        return None
    try:
        return load_object(config.dataset_fn, "dataset_fn")(
            section.path,
            split=section.split,
            tokenizer=tokenizer,
            max_length=section.max_length,
            **section.dataset_kwargs,
        )
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{key}: {one_line(e)}") from e
