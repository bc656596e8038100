"""A dense rank with few rows or none: dummy rows of weight 0 for what AReaL requires.

AReaL's dense engine makes as many micro-batches on every rank as on the one with the
most, none of them empty; and its algorithms are not meant for no rows at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils.data import (
    DEFAULT_MAX_TOKENS_PER_MB,
    MicroBatchSpec,
    allocate_balanced_mbs,
    concat_padded_tensors,
    tensor_container_to,
)
from torch import Tensor

from areal_dta.engine.batch import load_batch
from areal_dta.engine.dummy import (
    Template,
    gather_template,
    template_of,
    zero_rows,
)
from areal_dta.engine.row_share import Item, widen
from areal_dta.engine.statistics import LossStatistics


class DenseRows(FSDPEngine):
    """Stands before one of AReaL's actors or critics among the bases of an engine.

    Every call is collective, as with AReaL; a rank may have any number of rows.
    """

    def compute_logp(self, items: list[Item]) -> list[Tensor]:
        return self._forward_some("compute_logp", items)

    def compute_values(self, items: list[Item]) -> list[Tensor]:
        return self._forward_some("compute_values", items)

    def compute_advantages(self, items: list[Item]) -> list[Item]:
        areal: Any = super()
        if items:
            return list(areal.compute_advantages(items))
        for norm in (self.actor.reward_norm, self.actor.adv_norm):
            if norm is not None:
                norm.join(self.device)
        return []

    def ppo_update(self, items: list[Item]) -> None:
        areal: Any = super()
        template = gather_template(items[0] if items else {}, self.cpu_group)
        if items or template is None:
            areal.ppo_update(items)
            return
        with LossStatistics().silent_call():
            rows = _dummy_rows(template, 1)
            areal.ppo_update([tensor_container_to(rows, self.device)])

    def train_batch(
        self, input_: Item, loss_fn: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, float]:
        rows = self._with_enough_rows(input_)
        num_calls = 0

        @functools.wraps(loss_fn)
        def counted(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            return loss_fn(*args, **kwargs)

        result: dict[str, float] = super().train_batch(rows, counted, *args, **kwargs)
        if not num_calls:  # AReaL leaves it out where nothing has weight
            self._call_silently(loss_fn, rows)
        return result

    def forward_batch(self, input_: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input_, dict):
            return super().forward_batch(input_, *args, **kwargs)
        num_rows = len(input_["attention_mask"])
        rows = self._with_enough_rows(input_)
        return super().forward_batch(rows, *args, **kwargs)[:num_rows]

    def _forward_some(self, method: str, items: list[Item]) -> list[Tensor]:
        call = getattr(super(), method)
        if items:
            return list(call(items))
        row = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        call([{"input_ids": row, "attention_mask": torch.ones_like(row).bool()}])
        return []

    @torch.no_grad()
    def _call_silently(self, loss_fn: Callable[..., Tensor], rows: Item) -> None:
        """For the keys of its statistics, which all ranks must export alike."""
        template = template_of(rows)
        assert template is not None
        one = load_batch(zero_rows(template, 1), MicroBatchSpec()).pack(
            [0], self.device
        )
        nothing = torch.zeros(1, device=self.device)
        with LossStatistics().silent_call():
            if self.config.is_critic:
                loss_fn(nothing[:, None], one)
            else:
                vocab = {"vocab_min_logits": nothing, "vocab_max_logits": nothing}
                loss_fn(nothing, nothing, one, **vocab)

    def _with_enough_rows(self, rows: Item) -> Item:
        """As many rows as there will be micro-batches, at least. Collective."""
        lengths = rows["attention_mask"].sum(-1).long().tolist()
        limit = self.config.mb_spec.max_tokens_per_mb or DEFAULT_MAX_TOKENS_PER_MB
        spec = MicroBatchSpec.new(
            self.config.mb_spec,
            n_mbs=min(self.config.mb_spec.n_mbs or 1, len(lengths)),
            max_tokens_per_mb=limit,
        )
        counts: list[Any] = [None] * dist.get_world_size(self.cpu_group)
        own = len(allocate_balanced_mbs(spec, lengths))
        wanted = max(own, self.config.mb_spec.n_mbs or 1)
        dist.all_gather_object(counts, wanted, group=self.cpu_group)
        num_missing = max(counts) - len(lengths)
        if num_missing <= 0:
            return rows
        template = template_of(rows)
        assert template is not None
        dummy = tensor_container_to(_dummy_rows(template, num_missing), self.device)
        plain = {k: v for k, v in rows.items() if k not in template}
        named = {k: v for k, v in rows.items() if k in template}
        return {**plain, **concat_padded_tensors([named, dummy])}


def _dummy_rows(template: Template, num_rows: int) -> Item:
    """Of two tokens: AReaL's critic squeezes one away."""
    rows = widen(zero_rows(template, num_rows), 2)
    rows["attention_mask"] = torch.ones((num_rows, 2), dtype=torch.bool)
    return rows
