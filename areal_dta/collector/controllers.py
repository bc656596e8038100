"""Controllers that dispatch sequences, not prompts, to data-parallel ranks.

A batch is planned once (`PlannedBatch`). ``compute_logp``, ``compute_values`` and
``ppo_update`` see rows as the plan cuts them; ``compute_advantages`` sees whole items.
What travels through the controller is where tensors are: a rank fetches the items that
it has rows of, results stay where they were computed, and an item's value that was
computed on several ranks is joined where it is needed (`engine/row_share.py`).

Any number of items, rows and ranks works. A rank without rows takes part in all calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from areal.infra import TrainController
from areal.infra.rpc.rtensor import RTensor
from areal.infra.utils.concurrent import run_async_task
from areal.trainer.ppo.actor import PPOActorController
from areal.trainer.ppo.critic import PPOCriticController

from areal_dta.collector.planned_batch import PlannedBatch, to_planned_batch
from areal_dta.collector.planner import BatchPlan, BatchPlanner
from areal_dta.engine.row_share import Item, Share, in_pieces, is_in_pieces

_FORWARD_KEYS = ("input_ids", "attention_mask", "loss_mask", "position_ids")
_RPC_META = {"broadcast": True}


class DispatchController(TrainController):
    """Mixin; list it before one of AReaL's controllers so that its methods win.

    ``planner`` may be set before the first batch; controllers with the same one and
    the same number of ranks share a batch's plan.
    """

    def __init__(self, train_engine: Any, config: Any, scheduler: Any) -> None:
        super().__init__(train_engine, config, scheduler)
        self.planner = BatchPlanner()
        self._dispatch_seconds, self._dispatched_bytes = 0.0, 0

    @property
    def num_ranks(self) -> int:
        return int(self.parallel_strategy.dp_size)

    def plan_batch(self, batch: PlannedBatch, num_minibatches: int) -> BatchPlan:
        """Return the plan of a batch for the ranks of this controller."""
        return batch.plan(self.planner, self.num_ranks, num_minibatches)

    def take_dispatch_metrics(self) -> dict[str, float]:
        """Return the seconds of dealing rows since the last call, without the ranks'
        work, and the bytes sent for it: shares, and the addresses of tensors."""
        found = {
            "collector/dispatch_seconds": self._dispatch_seconds,
            "collector/dispatched_bytes": float(self._dispatched_bytes),
        }
        self._dispatch_seconds, self._dispatched_bytes = 0.0, 0
        return found

    def ppo_update(self, items: Sequence[Item]) -> None:
        batch = to_planned_batch(items)
        plan = self.plan_batch(batch, self.config.ppo_n_minibatches)
        sent, shares, _ = self._deal(batch, plan)
        self._call_heads("dispatch_update", sent, shares)

    def take_block_samples(self) -> Any:
        """Return the blocks that the workers measured since the last call."""
        return self._custom_function_call("take_block_samples")

    def _forward(self, method: str, items: Sequence[Item]) -> list[Any]:
        """Return one value per item: an RTensor [B, S], or pieces of one."""
        batch = to_planned_batch(items)
        plan = self.plan_batch(batch, batch.num_minibatches)
        slim = batch.with_items([_forward_item(item) for item in batch])
        sent, shares, items_of_ranks = self._deal(slim, plan)
        methods = [method] * len(sent)
        results = self._call_heads("dispatch_forward", methods, sent, shares)
        pieces: list[list[tuple[Any, list[int]]]] = [[] for _ in batch]
        for share, indices, values in zip(shares, items_of_ranks, results, strict=True):
            rows_of_items = Share.from_text(share).all_rows()
            for i, value, rows in zip(indices, values, rows_of_items, strict=True):
                pieces[i].append((value, rows))
        return [_join_if_whole(of_item) for of_item in pieces]

    def _deal(
        self, batch: PlannedBatch, plan: BatchPlan
    ) -> tuple[list[list[Item]], list[str], list[list[int]]]:
        started = time.perf_counter()
        sent, shares, items_of_ranks = deal(batch, plan)
        self._dispatched_bytes += sum(map(len, shares))
        for address, shards in RTensor.collect_shards(sent).items():
            self._dispatched_bytes += sum(len(str(s)) + len(address) for s in shards)
        self._dispatch_seconds += time.perf_counter() - started
        return sent, shares, items_of_ranks

    def _call_heads(self, method: str, *args_of_ranks: list[Any]) -> list[Any]:
        """Call every rank; each argument, like the result, is a list over ranks."""
        results = run_async_task(
            self._call_workers, method, list(args_of_ranks), {}, rpc_meta=_RPC_META
        )
        pairs = zip(results, self.workers_is_dp_head, strict=True)
        return [result for result, is_head in pairs if is_head]


class DTAActorController(DispatchController, PPOActorController):
    """Controller of the actor, the reference or a teacher."""

    def compute_logp(self, items: Sequence[Item]) -> list[Any]:
        return self._forward("compute_logp", items)

    def compute_advantages(self, items: Sequence[Item]) -> PlannedBatch:
        batch = to_planned_batch(items)
        items_of_ranks = split_by_order(batch, self.num_ranks)
        sent = [[batch[i] for i in of_rank] for of_rank in items_of_ranks]
        widths = [batch.width] * len(sent)
        results = self._call_heads("dispatch_advantages", sent, widths)
        done: list[Item] = [{}] * len(batch)
        for of_rank, items_of_rank in zip(items_of_ranks, results, strict=True):
            for i, item in zip(of_rank, items_of_rank, strict=True):
                done[i] = {**batch[i], **item}
        return batch.with_items(done)

    def prepare_batch(self, *args: Any, **kwargs: Any) -> list[Item]:
        """Return a batch, planned if the rollout controller has a collector."""
        hook = getattr(self.rollout, "collector_hook", None)
        if hook is None:
            return list(super().prepare_batch(*args, **kwargs))
        num_minibatches = self.config.ppo_n_minibatches
        batch: PlannedBatch = hook.next_batch(
            lambda: PPOActorController.prepare_batch(self, *args, **kwargs),
            lambda b: b.plan_now(self.planner, self.num_ranks, num_minibatches),
        )
        batch.num_minibatches = num_minibatches
        return batch


class DTACriticController(DispatchController, PPOCriticController):
    def compute_values(self, items: Sequence[Item]) -> list[Any]:
        return self._forward("compute_values", items)


_CONTROLLERS = {
    PPOActorController: DTAActorController,
    PPOCriticController: DTACriticController,
}


def controller_of(engine_class: Any, config: Any, scheduler: Any) -> Any:
    """Return the controller of an engine: ours for PPO, AReaL's own for the rest.

    Raises:
        ValueError: the engine refuses the configuration.
    """
    stock = engine_class.as_controller(config, scheduler)
    ours = _CONTROLLERS.get(type(stock))
    return stock if ours is None else ours(engine_class, config, scheduler)


def deal(
    batch: PlannedBatch, plan: BatchPlan
) -> tuple[list[list[Item]], list[str], list[list[int]]]:
    """Return per rank the items that it has rows of, its share, and their indices."""
    sent, shares, items_of_ranks = [], [], []
    for rank in range(plan.num_ranks):
        rows_of: dict[int, dict[int, list[int]]] = {}  # item -> minibatch -> rows
        for m in range(len(plan.minibatches)):
            for i, row in plan.rows(rank, m):
                rows_of.setdefault(i, {}).setdefault(m, []).append(row)
        share = Share(
            tuple(
                tuple(tuple(sorted(of.get(m, ()))) for of in rows_of.values())
                for m in range(len(plan.minibatches))
            ),
            batch.width,
        )
        sent.append([batch[i] for i in rows_of])
        shares.append(share.to_text())
        items_of_ranks.append(list(rows_of))
    return sent, shares, items_of_ranks


def _join_if_whole(pieces: list[tuple[Any, list[int]]]) -> Any:
    """Return a value as it is if one rank computed all its rows in order."""
    values, rows = zip(*pieces, strict=True)
    if len(pieces) == 1 and rows[0] == sorted(rows[0]):
        return values[0]
    return in_pieces(values, rows)


def _forward_item(item: Item) -> Item:
    return {
        key: value
        for key, value in item.items()
        if (key in _FORWARD_KEYS or key.startswith("multi_modal"))
        and not is_in_pieces(value)
    }


def split_by_order(batch: PlannedBatch, num_ranks: int) -> list[list[int]]:
    """Cut the items, in depth-first order, evenly by tokens.

    This need not wait for the plan, and much of an item goes to the rank that will
    train it, which fetches it anyway.
    """
    tokens: dict[int, int] = {}
    lengths = batch.sequences.order.length_N.tolist()
    for (item, _), length in zip(batch.sequences.owners, lengths, strict=True):
        tokens[item] = tokens.get(item, 0) + length
    total, before = sum(tokens.values()), 0
    items_of_ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for item, num in tokens.items():
        middle = before + num / 2
        items_of_ranks[min(num_ranks - 1, int(middle * num_ranks / total))].append(item)
        before += num
    return items_of_ranks
