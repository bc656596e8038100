"""Configuration between its files and schema. (Separate module: a light import.)"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration, not yet checked against the schema."""

    config: DictConfig
    file: Path
    choices: dict[str, str]
    """The option taken for each config group, e.g. ``{"hardware": "cpu"}``."""
    groups: tuple[str, ...]
    """All config groups that could have been given."""
    named: frozenset[str] = frozenset()
    """Top-level keys that the file itself or an override names: not those that only
    config groups bring."""
