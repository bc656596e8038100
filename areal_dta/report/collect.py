"""From AReaL's statistics of a step to our record of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from areal_dta.report.batch_sharing import BatchShape
from areal_dta.report.step_metrics import StepMetrics

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
_GAP, _GAP_TOKENS = "logprob_gap/max", "logprob_gap/num_tokens"
_EPISODES = "rollout/"
_COLLECTOR = ("collector/", "plan/")
_ROLLOUT = "timeperf/rollout"
_UPDATE = "timeperf/update_weights"
_TRAIN = (
    "timeperf/critic_values",
    "timeperf/ref_logp",
    "timeperf/teacher_logp",
    "timeperf/recompute_logp",
    "timeperf/compute_advantage",
    "timeperf/train_step",
    "timeperf/critic_train_step",
)


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
        shape: of the step's batch; None if it was not seen.
        step_seconds: wall clock since the last step.
    """
    train = [stats[key] for key in _TRAIN if key in stats]
    reward = _get(stats, _REWARD)
    if reward is None and shape is not None:
        reward = shape.reward
    return StepMetrics(
        step=step,
        reward=reward,
        loss=_get(stats, *_LOSS),
        grad_norm=_get(stats, *_GRAD_NORM),
        sequence_tokens=shape.sequence_tokens if shape else None,
        tree_tokens=shape.tree_tokens if shape else None,
        sharing_ratio=shape.sharing_ratio if shape else None,
        rollout_seconds=_get(stats, _ROLLOUT),
        train_seconds=sum(train) if train else None,
        step_seconds=step_seconds,
        update_seconds=_get(stats, _UPDATE),
        predicted_saving=shape.predicted_saving if shape else None,
        num_sequences=shape.num_sequences if shape else None,
        accuracy=_get(stats, *_ACCURACY),
        value_loss=_get(stats, _VALUE_LOSS),
        logprob_gap=_get(stats, _GAP) if stats.get(_GAP_TOKENS) else None,
        rollout=_of_episodes(stats),
        collector=_of_collector(stats),
    )


def _get(stats: Mapping[str, float], *keys: str) -> float | None:
    value = next((stats[key] for key in keys if key in stats), None)
    return None if value is None or not math.isfinite(value) else float(value)


def _of_episodes(stats: Mapping[str, float]) -> dict[str, float]:
    return {
        key.removeprefix(_EPISODES): float(value)
        for key, value in stats.items()
        if key.startswith(_EPISODES) and math.isfinite(value)
    }


def _of_collector(stats: Mapping[str, float]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in stats.items()
        if key.startswith(_COLLECTOR) and math.isfinite(value)
        if not key.endswith("__count")  # how many values AReaL averaged
    }
