"""AReaL's losses on trees: what each needs, when it is called, how it is scaled.

A loss that *adds up* is, weighted as AReaL weighs it, the sum of the losses of any
parts of its micro-batch, down to single sequences. It is evaluated per part, when the
traversal leaves the block in which the part's sequences end (scope ``sequence``). For
any other loss all outputs are collected first, by one more forward, and it is called
per micro-batch on all of its rows, as AReaL calls it (scope ``batch``): always exact.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_dta.engine.batch import Alignment, OutputRule, RankBatch, to_device
from areal_dta.engine.statistics import LossStatistics

LossFn = Callable[..., Tensor]
LossWeightFn = Callable[[dict[str, Any]], Tensor]


@dataclass(frozen=True, slots=True)
class LossTraits:
    needed_outputs: OutputRule | None
    """The outputs that can change the loss; None: all."""
    adds_up: bool
    can_split: bool
    """Whether parts of a micro-batch can be evaluated at all, if only approximately."""


_UNKNOWN = LossTraits(needed_outputs=None, adds_up=False, can_split=True)
_AT_OUTPUTS, _AT_TOKENS = OutputRule(Alignment.OUTPUT), OutputRule(Alignment.TOKEN)
# (module, name), so that no module is imported only to be compared with
_KNOWN: dict[tuple[str, str], LossTraits] = {
    # PPO, GRPO, GSPO, SAPO, rejection sampling at either level and distillation: sums
    # over tokens or sequences, divided by the number of loss tokens.
    ("areal.trainer.ppo.actor", "grpo_loss_fn"): LossTraits(_AT_OUTPUTS, True, True),
    ("areal.trainer.ppo.critic", "ppo_loss_fn"): LossTraits(_AT_OUTPUTS, True, True),
    # divides by 1e-5 + count, so parts differ by 1e-5 / count
    ("areal.trainer.sft.lm_engine", "compute_packed_sft_loss"): LossTraits(
        _AT_OUTPUTS, adds_up=False, can_split=True
    ),
    ("areal.trainer.dpo.dpo_engine", "compute_dpo_loss"): LossTraits(
        _AT_TOKENS, adds_up=False, can_split=False
    ),
    ("areal.trainer.rw.rw_engine", "compute_rw_loss"): LossTraits(
        OutputRule(None, last=True), adds_up=False, can_split=False
    ),
}


def traits_of(loss_fn: Callable[..., Any]) -> LossTraits:
    """Look a loss function up, also inside ``functools.partial`` and ``wraps``.

    One that is not AReaL's may read any output, and is not known to add up.
    """
    inner: Any = loss_fn
    options: dict[str, Any] = {}
    while True:
        if isinstance(inner, functools.partial):
            options = {**inner.keywords, **options}  # the outer one wins
            inner = inner.func
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            break
    key = getattr(inner, "__module__", ""), getattr(inner, "__name__", "")
    traits = _KNOWN.get(key, _UNKNOWN)
    if traits.adds_up and options.get("m2_threshold") is not None:
        # M2PO chooses its mask among the tokens of the micro-batch.
        return replace(traits, adds_up=False, can_split=False)
    return traits


def choose_scope(traits: LossTraits, option: str) -> str:
    """Return ``sequence`` or ``batch`` for ``dta.loss_scope``.

    Raises:
        ValueError: the scope is not possible with this loss.
    """
    assert option in ("auto", "sequence", "batch"), option  # DTAOptions refuses others
    if option == "auto":
        return "sequence" if traits.adds_up else "batch"
    if option == "sequence" and not traits.can_split:
        raise ValueError(
            "dta.loss_scope=sequence: this loss is one of whole micro-batches (of "
            "pairs, or with a mask chosen among all tokens); set it to auto or batch"
        )
    return option


def with_own_prox_logp(loss_fn: LossFn) -> LossFn:
    """Give AReaL's actor loss the detached training logprobs as ``prox_logp``.

    With one minibatch per update nothing changes the weights between ``compute_logp``
    and the update's own forward, and there is no dropout: both give the same logprobs.
    So this is exact, saves a forward, and is free of the noise between two passes in
    low precision. The importance weight is then 1 and the approximate KL 0.
    """

    @functools.wraps(loss_fn)
    def fused(logprobs: Any, entropy: Any, mb_input: Any, **kwargs: Any) -> Any:
        mb_input = {**mb_input, "prox_logp": logprobs.detach()}
        return loss_fn(logprobs, entropy, mb_input, **kwargs)

    return fused


class MicroBatchLoss:
    """Calls ``loss_fn`` on packed sequences of one rank, and scales it.

    A micro-batch whose weight is 0 is left out, as in AReaL. In any other, sequences
    of weight 0 are passed to the loss for its statistics only.

    Making one is collective: weights are relative to their sum over all ranks.

    Args:
        placeholder: of a rank whose batch has no rows.
        group: a CPU group of all ranks.
        is_critic: the loss is ``loss_fn(values, mb_input)``; otherwise
            ``loss_fn(logprobs, entropies, mb_input, ...)``.
        whole: every call brings all sequences, and a micro-batch is evaluated on all
            of its rows, as in AReaL; otherwise on those that a call brings.

    Raises:
        ValueError: no rank has weight; or not ``whole``, and the weights do not add up
            over the rows.
    """

    def __init__(
        self,
        batch: RankBatch,
        placeholder: RankBatch | None,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        device: torch.device,
        group: dist.ProcessGroup,
        is_critic: bool = False,
        whole: bool = False,
    ) -> None:
        self.batch, self._placeholder, self._device = batch, placeholder, device
        self._loss_fn, self._weight_fn = loss_fn, loss_weight_fn
        self.needed_outputs = traits_of(loss_fn).needed_outputs
        self.statistics = LossStatistics()
        self._is_critic, self._whole = is_critic, whole
        self._micro_batch_of = {
            row: mb for mb, rows in enumerate(batch.micro_batches) for row in rows
        }
        self._weights = [self._weight(rows) for rows in batch.micro_batches]
        if not whole:
            for rows, weight in zip(batch.micro_batches, self._weights, strict=True):
                self._check_additive(rows, weight)
        total = torch.tensor(sum(self._weights), dtype=torch.float64)
        dist.all_reduce(total, group=group)
        self._total_weight = float(total)
        if not self._total_weight > 0:
            raise ValueError(
                f"the loss weights of all ranks add up to {self._total_weight}; "
                "expected more than 0: does any token of the batch have loss_mask set?"
            )

    def __call__(self, rows: list[int], outputs: Sequence[list[Tensor]]) -> Tensor:
        """Return the sum over micro-batches of loss * weight / total weight.

        Args:
            rows: indices of the rows whose loss is wanted.
            outputs: logprobs and entropies, or values; one tensor per row in each.
        """
        # the rows of this call, per micro-batch
        total = torch.zeros((), device=self._device)
        parts: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            parts[self._micro_batch_of[row]].append(row)
        for mb, chosen in sorted(parts.items()):
            if self._weights[mb] == 0:
                continue
            if self._whole:  # also rows without tokens, which are in no tree
                chosen = self.batch.micro_batches[mb]
            # the loss, without a graph if it has no weight
            # (weighed on the host: to read it there waits for nothing)
            mb_input = self.batch.pack(chosen, torch.device("cpu"))
            weight = float(self._weight_fn(mb_input))
            mb_input = to_device(mb_input, self._device)
            with (
                torch.set_grad_enabled(torch.is_grad_enabled() and weight != 0),
                self.statistics.call(mb, weight),
            ):
                found = [dict(zip(rows, values, strict=True)) for values in outputs]
                packed = [
                    self.batch.pack_outputs(chosen, x, self._device) for x in found
                ]
                loss = self._call(packed, mb_input)
            if weight != 0:
                total = total + loss * (weight / self._total_weight)
        return total

    def row_shares(self, rows: list[int], granularity: int) -> list[float]:
        """Return each row's share in the weight of all ranks.

        Rows whose loss cannot be split, ``granularity`` neighbours, get equal shares;
        those of a micro-batch that is left out none.
        """
        if traits_of(self._loss_fn).can_split:
            granularity = 1
        share_of: dict[int, float] = {}
        for first in range(0, self.batch.num_rows, granularity):
            unit = list(range(first, first + granularity))
            is_trained = self._weights[self._micro_batch_of[first]] != 0
            weight = self._weight(unit) if is_trained else 0.0
            share = weight / self._total_weight / granularity
            share_of.update(dict.fromkeys(unit, share))
        return [share_of[row] for row in rows]

    def finish(self) -> None:
        """Log what the loss has logged, after it was called on all rows."""
        batch = self._placeholder or self.batch
        if not self.statistics.num_calls and batch.num_rows:
            self._call_silently(batch)
        self.statistics.flush()

    def _call_silently(self, batch: RankBatch) -> None:
        """Record the keys that the loss logs: every rank must export the same."""
        rows = batch.micro_batches[0]
        mb_input = batch.pack(rows, self._device)
        num_tokens = sum(batch.lengths[row] for row in rows)
        num_outputs = 1 if self._is_critic else 2
        zeros = torch.zeros((num_outputs, num_tokens), device=self._device)
        with torch.no_grad(), self.statistics.silent_call():
            self._call(list(zeros), mb_input)

    def _call(self, outputs: list[Tensor], mb_input: Any) -> Tensor:
        if self._is_critic:
            return self._loss_fn(*outputs, mb_input)
        # Extreme logits are known only at positions with a label: these statistics are
        # left out, because they would be wrong.
        return self._loss_fn(
            *outputs, mb_input, vocab_min_logits=None, vocab_max_logits=None
        )

    def _weight(self, rows: list[int]) -> float:
        return float(self._weight_fn(self.batch.pack(rows, torch.device("cpu"))))

    def _check_additive(self, rows: list[int], weight: float) -> None:
        # the loss of a micro-batch is put together from parts
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
