"""What a training batch looks like as a prefix tree, seen from the controller.

Computed for every engine alike, so that a dense run shows what the tree engine would
share. Cost: the batch's token ids and masks travel once to the controller, and the tree
is built in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from areal.infra.rpc.rtensor import RTensor
from numpy.typing import NDArray

from areal_dta.config.schema import DTAConfig
from areal_dta.schedule import (
    DEFAULT_BLOCK_TOKENS,
    FlopModel,
    NeededOutputs,
    build_schedule,
)
from areal_dta.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sizes of one training batch."""

    num_sequences: int
    sequence_tokens: int
    tree_tokens: int
    sharing_ratio: float
    predicted_saving: float | None
    """1 - FLOPs of the tree's schedule, for what the loss needed, / FLOPs of dense
    training, which projects every position; None if unknown."""
    reward: float | None
    """Mean over the sequences."""


class BatchMeter:
    """Measures batches against one model and the engine's budgets."""

    def __init__(
        self,
        flop_model: FlopModel | None,
        block_tokens: int,
        retain_tokens: int | None,
        loss_positions_only: bool = True,
        of_scores: bool = False,
    ) -> None:
        """
        Args:
            loss_positions_only: whether the engine leaves out what no loss needed.
            of_scores: of a reward model, which reads each sequence's last value.
        """
        self._loss_positions_only = loss_positions_only
        self._flop_model = flop_model
        self._block_tokens = block_tokens
        self._retain_tokens = retain_tokens
        self._of_scores = of_scores

    def measure(self, batch: Sequence[dict[str, Any]]) -> BatchShape:
        """Measure a batch as AReaL's controller holds it: one dict a prompt, or a
        sequence."""
        items = _fetch(batch, ("input_ids", "attention_mask", "loss_mask", "rewards"))
        sequences = [s for item in items for s in _rows(item, "input_ids")]
        rewards = [
            float(reward)
            for item in items
            if "rewards" in item
            for reward in item["rewards"].flatten()
        ]
        positions = None
        if self._loss_positions_only and all("loss_mask" in item for item in items):
            # token-aligned: the loss reads the output before a token that is learned
            masks = [s for item in items for s in _rows(item, "loss_mask")]
            positions = [mask[1:] != 0 for mask in masks]
        return self.measure_sequences(sequences, rewards, positions)

    def measure_sequences(
        self,
        sequences: Sequence[NDArray[np.integer]],
        rewards: Sequence[float] = (),
        positions: Sequence[NDArray[np.bool_]] | None = None,
    ) -> BatchShape:
        tree = PrefixTree.from_sequences(sequences)
        saving = None
        if self._flop_model is not None:
            schedule = build_schedule(
                tree,
                self._block_tokens,
                self._retain_tokens,
                needed=self._needed(tree, positions),
            )
            saving = 1.0 - 1.0 / self._flop_model.saving(tree, schedule)
        return BatchShape(
            num_sequences=tree.num_sequences,
            sequence_tokens=tree.num_sequence_tokens,
            tree_tokens=tree.num_tree_tokens,
            sharing_ratio=tree.sharing_ratio,
            predicted_saving=saving,
            reward=sum(rewards) / len(rewards) if rewards else None,
        )

    def _needed(
        self, tree: PrefixTree, positions: Sequence[NDArray[np.bool_]] | None
    ) -> NeededOutputs | None:
        if not self._of_scores:
            return (
                None
                if positions is None
                else NeededOutputs.logprobs_at(tree, positions)
            )
        if not self._loss_positions_only:
            return NeededOutputs.values_at(tree, None)
        lengths = map(tree.sequence_length, range(tree.num_sequences))
        return NeededOutputs.values_at(tree, [np.arange(n) == n - 1 for n in lengths])


def batch_meter(config: DTAConfig) -> BatchMeter:
    """A meter with the model and the budgets of a run."""
    options = config.actor.dta
    # With auto the engine fits them to its memory: blocks of the default size, and all
    # graphs kept, are what it chooses where there is enough.
    block, retain = options.block_tokens, options.retain_tokens
    of_scores = config.algorithm == "rw"
    return BatchMeter(
        model_flops(config.actor.path, of_scores),
        block if isinstance(block, int) else DEFAULT_BLOCK_TOKENS,
        retain if isinstance(retain, int) else None,
        loss_positions_only=options.positions == "auto",
        of_scores=of_scores,
    )


def model_flops(model_path: str, of_scores: bool = False) -> FlopModel | None:
    """FLOPs of a model, or None if its architecture is not one that can be counted."""
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(model_path)
        return FlopModel.from_config(model, is_critic=of_scores)
    except ValueError:
        return None


def _fetch(
    batch: Sequence[dict[str, Any]], keys: Sequence[str]
) -> list[dict[str, Any]]:
    # Copies: fetching fills an RTensor in place, and a filled one would be sent
    # along, data and all, with every later call to a worker.
    remote = [
        {
            k: replace(v) if isinstance(v, RTensor) else v
            for k, v in item.items()
            if k in keys
        }
        for item in batch
    ]
    return list(RTensor.localize(remote))


def _rows(item: dict[str, torch.Tensor], key: str) -> list[NDArray[np.int64]]:
    values, mask = item[key], item["attention_mask"].bool()
    rows = [
        row[kept].numpy().astype(np.int64)
        for row, kept in zip(values, mask, strict=True)
    ]
    return [row for row in rows if len(row)]
