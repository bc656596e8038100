"""One record a training step, and the JSON-lines file that keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One training step. A value that is unknown or not finite is None."""

    step: int
    """Counts from 1."""
    reward: float | None
    """Mean reward of the batch's sequences, before any normalisation; of rollouts."""
    loss: float | None
    """Of the policy and of SFT a mean over the tokens that carry loss, of DPO and of
    reward models one over pairs."""
    grad_norm: float | None
    """Before clipping."""
    sequence_tokens: int | None
    tree_tokens: int | None
    """Tokens of the batch's prefix tree, whether or not the engine uses it."""
    sharing_ratio: float | None
    rollout_seconds: float | None
    """Time the trainer waited for its batch (rollouts also run while it trains)."""
    train_seconds: float | None
    """All forward passes and updates, of the critic and the reference as well."""
    step_seconds: float | None
    """Wall clock from step to step."""
    update_seconds: float | None = None
    """Weights from the trainer to the rollout server."""
    predicted_saving: float | None = None
    """Share of the dense engine's FLOPs that the tree engine need not spend."""
    num_sequences: int | None = None
    logprob_gap: float | None = None
    """Largest difference between the rollout server's and the trainer's logprobs, over
    tokens of the trainer's version; None where they are not recomputed."""
    rollout: dict[str, float] = field(default_factory=dict)
    """What the workflow logs of its episodes: means by name."""
    collector: dict[str, float] = field(default_factory=dict)
    """What the rollout collector and the plan of the batch tell, by name (keys
    ``collector/*`` and ``plan/*``)."""
    accuracy: float | None = None
    """Share of the pairs in which the chosen one is preferred; DPO, reward models."""
    value_loss: float | None = None
    """Of the critic, a mean over the tokens that carry loss."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepMetrics:
        """From a decoded JSON line; unknown keys are ignored."""
        names = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in record.items() if k in names})

    def to_record(self) -> dict[str, Any]:
        """For `json.dumps`: not-finite numbers, which JSON lacks, become None."""
        record = asdict(self)
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[key] = None
        return record


class MetricsWriter:
    """Appends to a JSON-lines file, on disk after each line."""

    def __init__(self, path: Path, resume: bool = False) -> None:
        """Start the file anew, keeping an older run's under the next free number.

        Args:
            resume: append to what is there instead.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not resume:
            path.rename(_free_name(path))
        self._file = open(path, "a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(json.dumps(metrics.to_record(), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """All complete lines; a last line cut short by a crash is left out."""
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            steps.append(StepMetrics.from_record(json.loads(line)))
    return steps


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free
