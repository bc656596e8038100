"""Planner of batches; its cost model is refitted with the trainers' measured blocks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_dta.balance.cost_model import CostModel
from areal_dta.balance.minibatches import minibatches
from areal_dta.balance.partition import METHODS, TOKENS, Plan, partition
from areal_dta.balance.pricing import Pricing
from areal_dta.collector.collector import BatchSequences
from areal_dta.schedule import DEFAULT_BLOCK_TOKENS, FlopModel
from areal_dta.schedule.block_features import BlockFeatures
from areal_dta.tree.leaf_order import LeafOrder
from areal_dta.tree.prefix_forest import ForestStats

# Of no model in particular: for those whose FLOPs cannot be counted, until measured.
_NOMINAL: Final = FlopModel(per_token=2e9, per_pair=1e5, per_output=2e8)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Assignment of a batch's sequences to minibatches and ranks."""

    sequences: BatchSequences
    minibatches: tuple[Plan, ...]
    """Sequence ids are indices into ``sequences.owners``. All ranks have all of these,
    some of them empty on a rank."""

    @property
    def num_ranks(self) -> int:
        return self.minibatches[0].num_ranks

    def rows(self, rank: int, minibatch: int) -> list[tuple[int, int]]:
        """Return (item, row) of a rank's sequences, in depth-first order."""
        assigned = self.minibatches[minibatch].assignments[rank]
        return [self.sequences.owners[n] for n in assigned]

    def metrics(self) -> dict[str, float]:
        plans = self.minibatches
        slowest = sum(plan.makespan_seconds for plan in plans)
        mean = sum(sum(plan.predicted_seconds) for plan in plans) / self.num_ranks
        values = {
            "imbalance": slowest / mean if mean else 1.0,
            "predicted_seconds": slowest,
            "repeated_tokens": sum(plan.num_repeated_tokens for plan in plans),
            "empty_ranks": sum(not part for p in plans for part in p.assignments),
        }
        return {f"plan/{name}": float(value) for name, value in values.items()}


class BatchPlanner:
    """Thread-safe planner of batches with one cost model.

    Args:
        flops: cost of the model; None where its FLOPs cannot be counted.
        block_tokens, retain_tokens: budgets that the executor runs with.
        seed: seed of the shuffle into minibatches.
        dense: plan for engines that compute every sequence by itself.
    """

    def __init__(
        self,
        flops: FlopModel | None = None,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        retain_tokens: int | None = None,
        seed: int = 0,
        dense: bool = False,
    ) -> None:
        self._cost = CostModel.from_flops(flops or _NOMINAL)
        self._block_tokens, self._retain_tokens = block_tokens, retain_tokens
        self._seed, self._dense = seed, dense
        self._lock = threading.Lock()

    def plan(
        self,
        sequences: BatchSequences,
        num_ranks: int,
        num_minibatches: int = 1,
        step: int = 0,
    ) -> BatchPlan:
        """Cut a batch into minibatches, and each of these into ranks.

        Args:
            num_minibatches: maximum; there are no more than items.
            step: added to the seed, so that every step shuffles differently.
        """
        with self._lock:
            pricing = Pricing.from_cost_model(
                self._cost, self._block_tokens, self._retain_tokens
            )
        order = sequences.order
        groups = np.array([item for item, _ in sequences.owners], np.int64)
        plans = []
        for chosen in minibatches(order, groups, num_minibatches, self._seed + step):
            picked = np.array(chosen, np.int64)
            part = order.subset(picked)
            plan = partition(
                # partition wants ids that count from 0
                LeafOrder(np.arange(len(picked)), part.length_N, part.lcp_N),
                num_ranks,
                pricing,
                sequences.num_outputs_N[picked],
                groups[picked],
                (TOKENS,) if self._dense else METHODS,
            )
            assignments = tuple(
                tuple(chosen[n] for n in rank) for rank in plan.assignments
            )
            plans.append(replace(plan, assignments=assignments))
        return BatchPlan(sequences, tuple(plans))

    def seconds(self, stats: ForestStats) -> float:
        """Predict the seconds of training on a tree or a forest, on one rank."""
        features = BlockFeatures(
            num_blocks=-(-stats.num_tree_tokens // self._block_tokens),
            num_grad_tokens=stats.num_tree_tokens,
            num_no_grad_tokens=0,
            num_pairs=stats.num_pairs,
            num_outputs=stats.num_outputs,
            num_loss_tokens=stats.num_sequence_tokens,
            num_segments=2 * stats.num_sequences,
        )
        with self._lock:
            return self._cost.seconds(features)

    def observe(self, samples_N9: NDArray[np.float64]) -> None:
        """Refit with measured blocks, each as ``BlockSample.to_floats`` returns it."""
        with self._lock:
            self._cost.observe(samples_N9)

    def num_samples(self) -> int:
        with self._lock:
            return self._cost.num_samples()

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return self._cost.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the measurements of another planner.

        Raises:
            ValueError: it is not the state of a cost model.
        """
        with self._lock:
            self._cost.load_state_dict(state)
