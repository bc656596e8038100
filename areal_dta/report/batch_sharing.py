"""Measure a training batch as a prefix tree, from the controller.

Done for every engine alike, so that a dense run shows what the tree engine would share.
For a batch that the collector took in, everything is known: no tensor travels, and the
cost is linear in its tokens (docs/scale.md). For others (SFT, pairs, AReaL's own
controller) token ids and masks travel once to the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_dta.collector.collector import BatchSequences
from areal_dta.collector.planned_batch import PlannedBatch
from areal_dta.collector.remote_tensors import fetch
from areal_dta.config.schema import DTAConfig
from areal_dta.report.step_metrics import BatchShape
from areal_dta.schedule import FlopModel, NeededOutputs, build_schedule
from areal_dta.tree import PrefixTree
from areal_dta.tree.prefix_tree import attended_pairs


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """Token ids of a batch, without padding."""

    sequences: Sequence[NDArray[np.integer]]
    loss_masks: Sequence[NDArray[Any]] | None
    """Per sequence the tokens that carry loss, [length]; None: not known."""
    rewards: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class BatchMeter:
    """Measures batches against one model and the engine's budgets."""

    flop_model: FlopModel | None
    """None where the model's FLOPs cannot be counted."""
    block_tokens: int
    retain_tokens: int | None
    loss_outputs_only: bool = True
    """The engine leaves out what no loss reads."""
    is_reward_model: bool = False
    """Only the last value of each sequence is read."""

    def measure(self, batch: Sequence[dict[str, Any]]) -> BatchShape:
        """Measure a batch as AReaL's controller holds it, one dict per item."""
        if isinstance(batch, PlannedBatch) and batch.sequences.reward is not None:
            return self._measure_collected(batch.sequences)
        tokens = self.tokens(batch)
        return self.measure_sequences(
            tokens.sequences, tokens.rewards, tokens.loss_masks
        )

    def tokens(self, batch: Sequence[dict[str, Any]]) -> BatchTokens:
        """Return the token ids of a batch, which travel here if they are elsewhere."""
        if isinstance(batch, PlannedBatch) and batch.sequences.reward is not None:
            known = batch.sequences
            return BatchTokens(known.tokens_N, _masks(known))
        items = fetch(batch, ("input_ids", "attention_mask", "loss_mask", "rewards"))
        sequences = [s for item in items for s in _rows(item, "input_ids")]
        rewards = [
            float(reward)
            for item in items
            if "rewards" in item
            for reward in item["rewards"].flatten()
        ]
        loss_masks = None
        if all("loss_mask" in item for item in items):
            loss_masks = [s for item in items for s in _rows(item, "loss_mask")]
        return BatchTokens(sequences, loss_masks, rewards)

    def measure_sequences(
        self,
        sequences: Sequence[NDArray[np.integer]],
        rewards: Sequence[float] = (),
        loss_masks: Sequence[NDArray[Any]] | None = None,
    ) -> BatchShape:
        """Measure a batch of unpadded sequences.

        Args:
            loss_masks: per sequence the tokens that carry loss; by default all.
        """
        tree = PrefixTree.from_sequences(sequences)
        saving = None
        if self.flop_model is not None:
            schedule = build_schedule(
                tree,
                self.block_tokens,
                self.retain_tokens,
                needed=self._needed_outputs(tree, loss_masks),
            )
            saving = 1.0 - 1.0 / self.flop_model.saving(tree, schedule)
        return BatchShape(
            num_sequences=tree.num_sequences,
            sequence_tokens=tree.num_sequence_tokens,
            tree_tokens=tree.num_tree_tokens,
            sharing_ratio=tree.sharing_ratio,
            predicted_saving=saving,
            reward=sum(rewards) / len(rewards) if rewards else None,
        )

    def _measure_collected(self, sequences: BatchSequences) -> BatchShape:
        stats = sequences.stats
        saving = None
        if self.flop_model is not None and not self.is_reward_model:
            if self.retain_tokens is None and self.loss_outputs_only:
                saving = _saving(self.flop_model, sequences)
            else:
                saving = self.measure_sequences(
                    sequences.tokens_N, (), _masks(sequences)
                ).predicted_saving
        return BatchShape(
            num_sequences=stats.num_sequences,
            sequence_tokens=stats.num_sequence_tokens,
            tree_tokens=stats.num_tree_tokens,
            sharing_ratio=stats.num_sequence_tokens / stats.num_tree_tokens,
            predicted_saving=saving,
            reward=sequences.reward,
        )

    def _needed_outputs(
        self, tree: PrefixTree, loss_masks: Sequence[NDArray[Any]] | None
    ) -> NeededOutputs | None:
        if self.is_reward_model:
            if not self.loss_outputs_only:
                return NeededOutputs.values_at(tree, None)
            lengths = map(tree.sequence_length, range(tree.num_sequences))
            return NeededOutputs.values_at(
                tree, [np.arange(n) == n - 1 for n in lengths]
            )
        if loss_masks is None or not self.loss_outputs_only:
            return None
        # Masks are aligned with tokens: the loss reads the output before each of them.
        return NeededOutputs.logprobs_at(tree, [mask[1:] != 0 for mask in loss_masks])


def batch_meter(config: DTAConfig) -> BatchMeter:
    """Return a meter with the model and the budgets of a run."""
    options = config.actor.dta
    is_reward_model = config.algorithm == "rw"
    return BatchMeter(
        model_flops(config.actor.path, is_reward_model),
        *options.nominal_budgets(),
        loss_outputs_only=options.positions == "auto",
        is_reward_model=is_reward_model,
    )


def model_flops(model_path: str, is_reward_model: bool = False) -> FlopModel | None:
    """Return the FLOPs of a model; None if its architecture cannot be counted."""
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(model_path)
        return FlopModel.from_config(model, is_critic=is_reward_model)
    except ValueError:
        return None


def _saving(flops: FlopModel, sequences: BatchSequences) -> float:
    """Return what `measure_sequences` predicts where no graph is recomputed.

    A schedule then computes each needed token once; those are counted along the
    depth-first order, without building the tree.
    """
    lengths, lcps = sequences.order.length_N.tolist(), sequences.order.lcp_N.tolist()
    num_tokens = num_pairs = num_outputs = 0
    has_output = np.zeros(max(lengths, default=0), bool)  # along the current path
    covered = 0  # depth to which earlier sequences have the current path computed
    pairs = zip(lengths, lcps, sequences.needed_outputs_N, strict=True)
    for length, lcp, needed in pairs:
        # What this sequence shares with earlier ones, and how much of it is computed
        covered = min(lcp, covered)
        has_output[lcp:length] = False
        # The loss reads the output before each needed token.
        depths = needed - 1
        num_outputs += len(depths) - int(np.count_nonzero(has_output[depths]))
        has_output[depths] = True
        end = int(needed[-1]) if len(needed) else 0
        if end > covered:
            num_tokens += end - covered
            num_pairs += attended_pairs(covered, end)
            covered = end
    ours = flops.forward(num_tokens, num_pairs, num_outputs)
    dense = flops.dense(lengths, training=False)
    return 1.0 - ours / dense if ours else 0.0


def _masks(sequences: BatchSequences) -> list[NDArray[np.bool_]]:
    masks = [np.zeros(n, bool) for n in sequences.order.length_N]
    for mask, needed in zip(masks, sequences.needed_outputs_N, strict=True):
        mask[needed] = True
    return masks


def _rows(item: dict[str, torch.Tensor], key: str) -> list[NDArray[np.int64]]:
    values, mask = item[key], item["attention_mask"].bool()
    rows = [
        row[kept].numpy().astype(np.int64)
        for row, kept in zip(values, mask, strict=True)
    ]
    return [row for row in rows if len(row)]
