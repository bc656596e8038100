"""AReaL's loss on some sequences of a micro-batch, weighted as AReaL weighs it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_dta.engine.batch import RankBatch, pad_to_labels
from areal_dta.engine.statistics import LossStatistics


class MicroBatchLoss:
    """Calls ``loss_fn`` on packed sequences of one rank.

    A micro-batch whose weight is 0 is left out, as AReaL does. Within another one,
    sequences of weight 0 are passed to the loss for its statistics only.

    Args:
        of_values: the loss is ``loss_fn(values, mb_input)``, a critic's; otherwise
            ``loss_fn(logprobs, entropies, mb_input, ...)``.
        whole: every call brings all sequences, and micro-batches are evaluated as
            AReaL would, on all of their rows; otherwise on those that a call brings.
    """

    def __init__(
        self,
        batch: RankBatch,
        loss_fn: Callable[..., Tensor],
        loss_weight_fn: Callable[[dict[str, Any]], Tensor],
        statistics: LossStatistics,
        device: torch.device,
        of_values: bool = False,
        whole: bool = False,
    ) -> None:
        self._batch, self._device = batch, device
        self._loss_fn, self._weight_fn = loss_fn, loss_weight_fn
        self._statistics = statistics
        self._of_values, self._whole = of_values, whole
        self._micro_batch_of = {
            row: number
            for number, rows in enumerate(batch.micro_batches)
            for row in rows
        }
        self._weights = [self._weight(rows) for rows in batch.micro_batches]
        if not whole:
            for rows, weight in zip(batch.micro_batches, self._weights, strict=True):
                self._check_additive(rows, weight)

    def local_weight(self) -> float:
        """Sum of the weights of this rank's micro-batches."""
        return sum(self._weights)

    def __call__(
        self, rows: list[int], outputs: Sequence[list[Tensor]], total_weight: float
    ) -> Tensor:
        """Loss of some rows: over their micro-batches, loss x weight / total weight.

        ``outputs``: logprobs and entropies, or values; a tensor a row in each.
        """
        total = torch.zeros((), device=self._device)
        at = {row: i for i, row in enumerate(rows)}
        parts: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            parts[self._micro_batch_of[row]].append(row)
        for number, chosen in sorted(parts.items()):
            if self._weights[number] == 0:
                continue
            if self._whole:  # with rows of no tokens, which are in no tree
                chosen = self._batch.micro_batches[number]
            mb_input = self._batch.pack(chosen, self._device)
            weight = float(self._weight_fn(mb_input))
            with (
                torch.set_grad_enabled(torch.is_grad_enabled() and weight != 0),
                self._statistics.call(number, weight),
            ):
                packed = [self._pack_outputs(chosen, at, values) for values in outputs]
                loss = self._call(packed, mb_input)
            if weight != 0:
                total = total + loss * (weight / total_weight)
        return total

    def call_silently_if_unused(self, dummy: RankBatch | None) -> None:
        """If the loss was not called on this rank, record its statistics' keys.

        Its peers have recorded them, and an export needs the same on every rank.
        """
        batch = dummy or self._batch
        if self._statistics.num_calls or not batch.num_rows:
            return
        rows = batch.micro_batches[0]
        mb_input = batch.pack(rows, self._device)
        num_tokens = sum(batch.lengths[row] for row in rows)
        num_outputs = 1 if self._of_values else 2
        zeros = torch.zeros((num_outputs, num_tokens), device=self._device)
        with torch.no_grad(), self._statistics.silent_call():
            self._call(list(zeros), mb_input)

    def _pack_outputs(
        self, rows: list[int], at: dict[int, int], values: list[Tensor]
    ) -> Tensor:
        nothing = torch.zeros(0, device=self._device)
        return pad_to_labels(
            [values[at[row]] if row in at else nothing for row in rows],
            [self._batch.lengths[row] for row in rows],
        )

    def _call(self, outputs: list[Tensor], mb_input: Any) -> Tensor:
        if self._of_values:
            return self._loss_fn(*outputs, mb_input)
        # The vocabulary's extreme logits are known at positions with a label only,
        # so those statistics are left out instead of being wrong.
        return self._loss_fn(
            *outputs, mb_input, vocab_min_logits=None, vocab_max_logits=None
        )

    def _weight(self, rows: list[int]) -> float:
        return float(self._weight_fn(self._batch.pack(rows, torch.device("cpu"))))

    def _check_additive(self, rows: list[int], weight: float) -> None:
        """A micro-batch's loss is put together from parts, so weights must add up."""
        half = len(rows) // 2
        if not half:
            return
        parts = self._weight(rows[:half]) + self._weight(rows[half:])
        if abs(parts - weight) > 1e-6 * max(abs(weight), 1.0):
            raise ValueError(
                f"loss_weight_fn gives {weight} for {len(rows)} sequences but {parts} "
                "for their two halves; the tree engine needs a weight that adds up "
                "over sequences, such as the number of loss tokens, or dta.loss_scope="
                "batch"
            )
