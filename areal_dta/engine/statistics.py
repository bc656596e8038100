"""Statistics of a step, equal to AReaL's although the loss is called per block.

AReaL calls the loss once per micro-batch. What the loss logs is taken out of AReaL's
``stats_tracker`` after every call and put back per micro-batch when all calls have been
made, as a single call would have logged it:

* token-level statistics and their denominators as one tensor each. The tracker checks
  the shapes of all earlier tensors whenever it takes another one, so that its time
  would grow with the square of the number of calls;
* scalars combined into one value, where the tracker would take the mean over calls.

An export aborts if a rank never logged a key that another rank did: a rank whose loss
never ran records the same keys, with nothing counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from areal.utils import stats_tracker
from areal.utils.stats_tracker import DistributedStatsTracker, ReduceType
from torch import Tensor

_COUNT_KEY = "n_valid_generated_tokens"  # next to the staleness averages
_NAME = "dta"  # scope of our own statistics


_Logged = tuple[float, float]
"""Value, and its weight."""
_T = TypeVar("_T")
_PerMicroBatch = dict[int, dict[str, list[_T]]]


class LossStatistics:
    """Collects what the loss calls of one ``train_batch`` or ``eval_batch`` log."""

    def __init__(self, tracker: DistributedStatsTracker | None = None) -> None:
        self._tracker = tracker or stats_tracker.DEFAULT_TRACKER
        # micro-batch -> key -> what each call logged
        self._scalars: _PerMicroBatch[_Logged] = defaultdict(lambda: defaultdict(list))
        self._tensors: _PerMicroBatch[Tensor] = defaultdict(lambda: defaultdict(list))
        self.num_calls = 0

    @contextmanager
    def call(self, micro_batch: int, weight: float) -> Iterator[None]:
        """Context manager for one call of the loss, on part of a micro-batch."""
        with self._recording() as recorded:
            yield
        self.num_calls += 1
        for key, values in recorded.items():
            if torch.is_tensor(values[0]):
                self._tensors[micro_batch][key] += values
                continue
            scope = key.rpartition("/")[0]
            counts = recorded.get(f"{scope}/{_COUNT_KEY}")
            call_weight = sum(counts) if counts else weight
            self._scalars[micro_batch][key] += [(x, call_weight) for x in values]

    @contextmanager
    def silent_call(self) -> Iterator[None]:
        """Context manager for a call of the loss that records keys, no counts."""
        with self._recording() as recorded:
            yield
        tracker = self._tracker
        with tracker.lock:
            for key, values in recorded.items():
                if not torch.is_tensor(values[0]):
                    continue
                if key not in tracker.denominators:  # it is one: count nothing
                    values = [torch.zeros_like(value) for value in values]
                tracker.stats[key] += values

    def discard(self) -> None:
        """Forget all calls, because they will be made again."""
        self._scalars.clear()
        self._tensors.clear()
        self.num_calls = 0

    def flush(self) -> None:
        """Log what was collected, per micro-batch and key, as AReaL would have."""
        tracker = self._tracker
        with tracker.lock:
            for _, tensors in sorted(self._tensors.items()):
                for key, values in tensors.items():
                    flat = torch.cat([value.reshape(-1) for value in values])
                    tracker.stats[key].append(flat)
            for _, scalars in sorted(self._scalars.items()):
                for key, logged in scalars.items():
                    tracker.stats[key].append(_combine(key, logged))
        self._scalars.clear()
        self._tensors.clear()

    @contextmanager
    def _recording(self) -> Iterator[dict[str, list[Any]]]:
        """Let the tracker record into a dictionary of its own meanwhile."""
        tracker = self._tracker
        recorded: dict[str, list[Any]] = defaultdict(list)
        with tracker.lock:
            before, tracker.stats = tracker.stats, recorded
        try:
            yield recorded
        finally:
            with tracker.lock:
                tracker.stats = before
            for key in [key for key, values in recorded.items() if not values]:
                del recorded[key]


def _combine(key: str, logged: list[_Logged]) -> float:
    values, weights = zip(*logged, strict=True)
    name = key.rpartition("/")[2]
    if key.startswith("timeperf/"):  # seconds of the calls
        return sum(values)
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    if name.startswith("n_"):
        return sum(values)
    if sum(weights) == 0:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in logged) / sum(weights)


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """What one rank did in one ``train_batch``."""

    sequence_tokens: int
    tree_tokens: int
    computed_tokens: int
    """Tree tokens; recomputed ones count twice."""
    num_blocks: int
    dense_flops: float
    tree_flops: float
    """FLOPs of the schedule, including recomputation."""
    loss: float
    """This rank's share; the shares of all ranks add up to the loss of the batch."""
    router_aux_loss: float = 0.0
    """This rank's share of the mean over sequences, without the coefficient."""

    def record(self, counts_update: bool, device: torch.device) -> None:
        """Add every field to the step's sums.

        Args:
            counts_update: true on exactly one rank.
            device: one that the export's all-reduce can read.
        """
        tracker = stats_tracker.get(_NAME)
        tracker.denominator(
            work=torch.ones(1, dtype=torch.bool, device=device),
            num_updates=torch.tensor([counts_update], device=device),
        )
        sums = {
            name: torch.tensor([float(value)], device=device)
            for name, value in asdict(self).items()
        }
        tracker.stat(denominator="work", reduce_type=ReduceType.SUM, **sums)


def record_expert_load(load: Sequence[Sequence[int]], group: dist.ProcessGroup) -> None:
    """Log how unevenly experts are chosen, over the tokens of all ranks. Collective.

    ``dta/expert_load_max_over_mean`` is the number of tokens of the busiest expert over
    the mean of all experts (1 if they are even), averaged over the layers with experts;
    ``.../layer_N`` is that of the N-th of them, from 0.

    Args:
        load: per such layer the number of tokens per expert on this rank; a tree token
            counts once per sequence through it.
    """
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, load, group=group)
    totals = [np.sum(counts, axis=0) for counts in zip(*ranks, strict=True)]
    ratios = [float(total.max() / max(total.mean(), 1e-9)) for total in totals]
    key = "expert_load_max_over_mean"
    tracker = stats_tracker.get(_NAME)
    tracker.scalar(**{key: sum(ratios) / len(ratios)})
    tracker.scalar(**{f"{key}/layer_{i}": ratio for i, ratio in enumerate(ratios)})


def derive_ratios(stats: dict[str, float]) -> dict[str, float]:
    """Turn the exported sums into what the user reads.

    ``dta/sharing_ratio``: sequence tokens over tree tokens; ``dta/predicted_saving``:
    dense over scheduled FLOPs, the predicted speed-up; ``dta/loss``: mean over the
    updates of the step, as ``dta/router_aux_loss``, which is left out where it is 0.
    Other sums stay.
    """
    stats = dict(stats)
    num_updates = stats.pop(f"{_NAME}/num_updates", 0.0)
    stats.pop(f"{_NAME}/work", None)
    dense = stats.pop(f"{_NAME}/dense_flops", 0.0)
    tree = stats.pop(f"{_NAME}/tree_flops", 0.0)
    router_loss = stats.pop(f"{_NAME}/router_aux_loss", 0.0)
    if not num_updates:
        return stats
    if router_loss:
        stats[f"{_NAME}/router_aux_loss"] = router_loss / num_updates
    stats[f"{_NAME}/loss"] /= num_updates
    if tree:
        sequence_tokens = stats[f"{_NAME}/sequence_tokens"]
        stats[f"{_NAME}/sharing_ratio"] = (
            sequence_tokens / stats[f"{_NAME}/tree_tokens"]
        )
        stats[f"{_NAME}/predicted_saving"] = dense / tree
    return stats
