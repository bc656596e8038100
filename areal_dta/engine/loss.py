"""AReaL's loss on some sequences of a micro-batch, weighted as AReaL weighs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areal_dta.engine.batch import RankBatch, pad_to_labels
from areal_dta.engine.statistics import LossStatistics


class MicroBatchLoss:
    """Calls ``loss_fn`` on packed sequences of one rank.

    A micro-batch whose weight is 0 is left out, as AReaL does. Within another one,
    sequences of weight 0 are passed to the loss for its statistics only.
    """

    def __init__(
        self,
        batch: RankBatch,
        loss_fn: Callable[..., Tensor],
        loss_weight_fn: Callable[[dict[str, Any]], Tensor],
        statistics: LossStatistics,
        device: torch.device,
    ) -> None:
        self._batch, self._device = batch, device
        self._loss_fn, self._weight_fn = loss_fn, loss_weight_fn
        self._statistics = statistics
        self._micro_batch_of = {
            row: number
            for number, rows in enumerate(batch.micro_batches)
            for row in rows
        }
        self._weights = [self._weight(rows) for rows in batch.micro_batches]
        for rows, weight in zip(batch.micro_batches, self._weights, strict=True):
            self._check_additive(rows, weight)

    def local_weight(self) -> float:
        """Sum of the weights of this rank's micro-batches."""
        return sum(self._weights)

    def __call__(
        self,
        rows: list[int],
        logprobs: list[Tensor],
        entropies: list[Tensor],
        total_weight: float,
    ) -> Tensor:
        """Loss of some rows: over their micro-batches, loss x weight / total weight."""
        total = torch.zeros((), device=self._device)
        for number in sorted({self._micro_batch_of[row] for row in rows}):
            if self._weights[number] == 0:
                continue
            at = [
                i for i, row in enumerate(rows) if self._micro_batch_of[row] == number
            ]
            chosen = [rows[i] for i in at]
            lengths = [self._batch.lengths[row] for row in chosen]
            mb_input = self._batch.pack(chosen, self._device)
            weight = float(self._weight_fn(mb_input))
            with (
                torch.set_grad_enabled(torch.is_grad_enabled() and weight != 0),
                self._statistics.call(number, weight),
            ):
                loss = self._call(
                    pad_to_labels([logprobs[i] for i in at], lengths),
                    pad_to_labels([entropies[i] for i in at], lengths),
                    mb_input,
                )
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
        mb_input = batch.pack([0], self._device)
        zeros = torch.zeros(batch.lengths[0], device=self._device)
        with torch.no_grad(), self._statistics.silent_call():
            self._call(zeros, zeros.clone(), mb_input)

    def _call(self, logprobs_T: Tensor, entropy_T: Tensor, mb_input: Any) -> Tensor:
        # The vocabulary's extreme logits are known at positions with a label only,
        # so those statistics are left out instead of being wrong.
        return self._loss_fn(
            logprobs_T,
            entropy_T,
            mb_input,
            vocab_min_logits=None,
            vocab_max_logits=None,
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
                "over sequences, such as the number of loss tokens"
            )
