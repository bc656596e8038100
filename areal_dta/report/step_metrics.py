"""The record of a training step: made from AReaL's statistics, kept as JSON lines."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

# The keys under which AReaL's trainers and engines export what we show. Of several, the
# one that the algorithm at hand exports.
_REWARD = "ppo_actor/task_reward/avg"
_LOSS = (
    "ppo_actor/update/actor_loss/avg",
    "sft/loss/avg",
    "dpo/loss/avg",
    "rw/loss/avg",
)
_GRAD_NORM = (
    "ppo_actor/update/grad_norm",
    "sft/grad_norm",
    "dpo/grad_norm",
    "rw/grad_norm",
)
_ACCURACY = ("dpo/reward_accuracy/avg", "rw/correct_ratio/avg")
_VALUE_LOSS = "ppo_critic/critic_loss/avg"
_EVAL_REWARD = "eval-rollout/reward"
_GAP, _GAP_TOKENS = "logprob_gap/max", "logprob_gap/num_tokens"
_ROLLOUT_SECONDS = "timeperf/rollout"
_UPDATE_SECONDS = "timeperf/update_weights"
_LOGPROB_SECONDS = (
    "timeperf/critic_values",
    "timeperf/ref_logp",
    "timeperf/teacher_logp",
    "timeperf/recompute_logp",
)
_TRAIN_SECONDS = (
    *_LOGPROB_SECONDS,
    "timeperf/compute_advantage",
    "timeperf/train_step",
    "timeperf/critic_train_step",
)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sizes of one training batch."""

    num_sequences: int
    sequence_tokens: int
    tree_tokens: int
    sharing_ratio: float
    predicted_saving: float | None
    """1 - FLOPs of the tree's schedule, with the outputs that the loss reads, / FLOPs
    of dense training, which computes every output; None if unknown."""
    reward: float | None
    """Mean over the sequences."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One training step. A value that is unknown or not finite is None."""

    step: int
    """Counts from 1."""
    reward: float | None
    """Mean reward of the batch's sequences, before any normalisation; of rollouts."""
    loss: float | None
    """Mean over the tokens that carry loss (policy, SFT) or over pairs (DPO, reward
    models)."""
    grad_norm: float | None
    """Norm before clipping."""
    sequence_tokens: int | None
    tree_tokens: int | None
    """Tokens of the batch's prefix tree, whether or not the engine uses it."""
    sharing_ratio: float | None
    rollout_seconds: float | None
    """Time that the trainer waited for its batch; rollouts also run while it trains."""
    train_seconds: float | None
    """All forward passes and updates, including those of critic and reference."""
    step_seconds: float | None
    """Wall clock from step to step."""
    update_seconds: float | None = None
    """Time of sending the weights from the trainer to the rollout server."""
    predicted_saving: float | None = None
    """Share of the dense engine's FLOPs that the tree engine need not spend."""
    num_sequences: int | None = None
    logprob_gap: float | None = None
    """Largest difference between the rollout server's and the trainer's logprobs, over
    tokens of the trainer's version; None where they are not recomputed."""
    rollout: dict[str, float] = field(default_factory=dict)
    """What the workflow logs of its episodes: means by name. With the embedded server
    also ``prefix_hit_rate``: cached tokens of the step's prompts / all of them."""
    collector: dict[str, float] = field(default_factory=dict)
    """What the collector and the plan of the batch report (keys ``collector/*`` and
    ``plan/*``)."""
    accuracy: float | None = None
    """Share of the pairs in which the chosen one is preferred; DPO, reward models."""
    verify: dict[str, float] = field(default_factory=dict)
    """What ``dta.verify_every`` found in this step (keys ``dta/verify_*``)."""
    value_loss: float | None = None
    """Loss of the critic, a mean over the tokens that carry loss."""
    logprob_seconds: float | None = None
    """Part of ``train_seconds``: forward passes for logprobs and values before the
    update; 0 where it needs none."""
    wait: dict[str, float] = field(default_factory=dict)
    """Seconds that the trainer waited, by reason (keys ``wait/*``); what is left of the
    step is its own work."""
    eval_reward: float | None = None
    """Mean reward of the evaluation set, in steps after which it was evaluated."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepMetrics:
        """Return the metrics of a decoded JSON line; unknown keys are ignored."""
        names = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in record.items() if k in names})

    def to_record(self) -> dict[str, Any]:
        """Return a dict for `json.dumps`; numbers that JSON lacks become None."""
        record = asdict(self)
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[key] = None
        return record


def step_metrics(
    step: int,
    stats: Mapping[str, float],
    shape: BatchShape | None,
    step_seconds: float,
) -> StepMetrics:
    """Make the record of one step.

    Args:
        step: counts from 1.
        stats: what AReaL commits to its loggers for this step.
        shape: sizes of the step's batch; None if they were not measured.
        step_seconds: wall clock since the last step.
    """
    finite = {key: float(v) for key, v in stats.items() if math.isfinite(v)}

    def first(*keys: str) -> float | None:
        key = next((key for key in keys if key in stats), None)
        return None if key is None else finite.get(key)

    train = [stats[key] for key in _TRAIN_SECONDS if key in stats]
    logprobs = [stats[key] for key in _LOGPROB_SECONDS if key in stats]
    reward = first(_REWARD)
    if reward is None and shape is not None:
        reward = shape.reward
    return StepMetrics(
        step=step,
        reward=reward,
        loss=first(*_LOSS),
        grad_norm=first(*_GRAD_NORM),
        sequence_tokens=shape.sequence_tokens if shape else None,
        tree_tokens=shape.tree_tokens if shape else None,
        sharing_ratio=shape.sharing_ratio if shape else None,
        rollout_seconds=first(_ROLLOUT_SECONDS),
        train_seconds=sum(train) if train else None,
        step_seconds=step_seconds,
        update_seconds=first(_UPDATE_SECONDS),
        predicted_saving=shape.predicted_saving if shape else None,
        num_sequences=shape.num_sequences if shape else None,
        accuracy=first(*_ACCURACY),
        value_loss=first(_VALUE_LOSS),
        logprob_gap=first(_GAP) if stats.get(_GAP_TOKENS) else None,
        rollout={
            key.removeprefix("rollout/"): value
            for key, value in finite.items()
            if key.startswith("rollout/")
        },
        collector={
            key: value
            for key, value in finite.items()
            if key.startswith(("collector/", "plan/"))
            if not key.endswith("__count")  # how many values AReaL averaged
        },
        verify={
            key: value
            for key, value in finite.items()
            if "dta/verify_" in key and not key.endswith("__count")
        },
        logprob_seconds=sum(logprobs) if train else None,
        wait={key: value for key, value in finite.items() if key.startswith("wait/")},
        eval_reward=first(_EVAL_REWARD),
    )


class MetricsWriter:
    """Writer of a JSON-lines file that is on disk after each line."""

    def __init__(self, path: Path, num_steps_done: int = 0) -> None:
        """Start the file anew, or continue it.

        Lines that do not belong to the run so far are kept in the old file, under the
        next free number; the new one begins with a copy of those that do.

        Args:
            num_steps_done: the run continues after this step: lines of later ones, and
                one that a crash cut short, do not belong to it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [x for x in lines if 0 < _step_of_line(x) <= num_steps_done]
            if kept != lines:
                _keep_old(path, "".join(kept))
        self._file = open(path, "a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(json.dumps(metrics.to_record(), allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _keep_old(path: Path, text: str) -> None:
    """Rename a file to the next free number, and start it anew with a text."""
    number = 1
    while (old := path.with_stem(f"{path.stem}.{number}")).exists():
        number += 1
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    shutil.copyfile(path, old)
    os.replace(new, path)


def _step_of_line(line: str) -> int:
    """Return the step of a line; 0 where a crash cut it short."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else 0
    except ValueError:  # another line was appended to it
        return 0


def read_metrics(path: Path) -> list[StepMetrics]:
    """Read all complete lines; a last line cut short by a crash is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [
        StepMetrics.from_record(json.loads(line))
        for line in lines
        if line.endswith("\n")
    ]
