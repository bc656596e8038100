"""Controllers that hand sequences, not prompts, to data-parallel ranks.

A batch is planned once (`PlannedBatch`). ``compute_logp``, ``compute_values`` and
``ppo_update`` see rows as the plan cuts them; ``compute_advantages`` sees whole items.
What travels through the controller is where tensors are: a rank fetches the groups that
it has rows of, results stay where they were computed, and an item's value that was
computed on several ranks is joined where it is needed (`engine/row_share.py`).

Any number of items, rows and ranks works. A rank without rows takes part in all calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal.infra import TrainController
from areal.infra.controller.train_controller import _is_tensor_like, _item_weight
from areal.infra.utils.concurrent import run_async_task
from areal.trainer.ppo.actor import PPOActorController
from areal.trainer.ppo.critic import PPOCriticController

from areal_dta.collector.planned_batch import Item, PlannedBatch, planned
from areal_dta.collector.planner import BatchPlan, BatchPlanner
from areal_dta.engine.row_share import Share, in_pieces, is_in_pieces

_FORWARD_KEYS = ("input_ids", "attention_mask", "loss_mask", "position_ids")
_RPC_META = {"broadcast": True}


class DispatchController(TrainController):
    """Stands before one of AReaL's controllers.

    ``planner`` may be set before the first batch; controllers with the same one and
    the same number of ranks share a batch's plan.
    """

    def __init__(self, train_engine: Any, config: Any, scheduler: Any) -> None:
        super().__init__(train_engine, config, scheduler)
        self.planner = BatchPlanner()

    def ppo_update(self, items: Sequence[Item]) -> None:
        batch = planned(items)
        plan = self._plan(batch, self.config.ppo_n_minibatches)
        sent, shares, _ = _deal(batch, plan)
        self._call_heads("dispatch_update", sent, shares)

    def take_block_samples(self) -> list[list[float]]:
        """Blocks that the workers measured since the last call."""
        samples: list[list[float]] = self._custom_function_call("take_block_samples")
        return samples

    def advance_lr_scheduler(self, num_steps: int) -> None:
        """As many steps at once, after recovery."""
        self._custom_function_call("advance_lr_scheduler", num_steps)

    def _forward(self, method: str, items: Sequence[Item]) -> list[Any]:
        """One value an item: an RTensor, or pieces of one."""
        batch = planned(items)
        plan = self._plan(batch, batch.num_minibatches)
        slim = batch.with_items([_forward_item(item) for item in batch])
        sent, shares, numbers = _deal(slim, plan)
        methods = [method] * len(sent)
        results = self._call_heads("dispatch_forward", methods, sent, shares)
        pieces: list[list[tuple[Any, list[int]]]] = [[] for _ in batch]
        for rank, of_rank in enumerate(results):
            rows = Share.from_text(shares[rank]).all_rows()
            for number, piece, of_item in zip(
                numbers[rank], of_rank, rows, strict=True
            ):
                pieces[number].append((piece, of_item))
        return [_value(of_item) for of_item in pieces]

    def _plan(self, batch: PlannedBatch, num_minibatches: int) -> BatchPlan:
        num_ranks = self.parallel_strategy.dp_size
        return batch.plan(self.planner, num_ranks, num_minibatches)

    def _call_heads(self, method: str, *args_of_ranks: list[Any]) -> list[Any]:
        """Each argument a list with the value of each rank; so is the result."""
        results = run_async_task(
            self._call_workers, method, list(args_of_ranks), {}, rpc_meta=_RPC_META
        )
        pairs = zip(results, self.workers_is_dp_head, strict=True)
        return [result for result, is_head in pairs if is_head]

    def _partition_inputs(
        self, group_size: int, /, *args: Any, **kwargs: Any
    ) -> tuple[list[list[Any]], dict[str, list[Any]], list[list[int]]]:
        """Whole items, for any other call; AReaL's needs a multiple of the ranks."""
        num_ranks = self.parallel_strategy.dp_size
        values = [*args, *kwargs.values()]
        first = next(value for value in values if _is_tensor_like(value))
        indices = _balanced(first, num_ranks, group_size)

        def split(value: Any) -> list[Any]:
            if not _is_tensor_like(value):
                return [value] * num_ranks
            return [[value[i] for i in of_rank] for of_rank in indices]

        return (
            [split(a) for a in args],
            {k: split(v) for k, v in kwargs.items()},
            indices,
        )


class DTAActorController(DispatchController, PPOActorController):
    """Of the actor, the reference and a teacher."""

    def compute_logp(self, items: Sequence[Item]) -> list[Any]:
        return self._forward("compute_logp", items)

    def compute_advantages(self, items: Sequence[Item]) -> PlannedBatch:
        batch = planned(items)
        numbers = whole_items(batch, self.parallel_strategy.dp_size)
        sent = [[batch[i] for i in of_rank] for of_rank in numbers]
        widths = [batch.width] * len(sent)
        results = self._call_heads("dispatch_advantages", sent, widths)
        done: list[Item] = [{}] * len(batch)
        for of_rank, items_of_rank in zip(numbers, results, strict=True):
            for i, item in zip(of_rank, items_of_rank, strict=True):
                done[i] = {**batch[i], **item}
        return batch.with_items(done)

    def prepare_batch(self, *args: Any, **kwargs: Any) -> list[Item]:
        """A batch and its plan, where the rollout controller has a collection."""
        collection = getattr(self.rollout, "collection", None)
        if collection is None:
            return list(super().prepare_batch(*args, **kwargs))
        num_minibatches = self.config.ppo_n_minibatches
        num_ranks = self.parallel_strategy.dp_size
        batch: PlannedBatch = collection.next_batch(
            lambda: PPOActorController.prepare_batch(self, *args, **kwargs),
            lambda b: b.plan_here(self.planner, num_ranks, num_minibatches),
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


def _deal(
    batch: PlannedBatch, plan: BatchPlan
) -> tuple[list[list[Item]], list[str], list[list[int]]]:
    """Per rank the items that it has rows of, its share as text, and their numbers."""
    sent, shares, numbers = [], [], []
    for rank in range(plan.num_ranks):
        rows_of: dict[int, dict[int, list[int]]] = {}  # item -> minibatch -> rows
        for m in range(len(plan.minibatches)):
            for item, row in plan.rows(rank, m):
                rows_of.setdefault(item, {}).setdefault(m, []).append(row)
        share = Share(
            tuple(
                tuple(tuple(sorted(of.get(m, ()))) for of in rows_of.values())
                for m in range(len(plan.minibatches))
            ),
            batch.width,
        )
        sent.append([batch[i] for i in rows_of])
        shares.append(share.to_text())
        numbers.append(list(rows_of))
    return sent, shares, numbers


def _value(pieces: list[tuple[Any, list[int]]]) -> Any:
    if len(pieces) == 1:
        value, rows = pieces[0]
        if rows == sorted(rows):  # all rows of the item, in order
            return value
    return in_pieces([p for p, _ in pieces], [rows for _, rows in pieces])


def _forward_item(item: Item) -> Item:
    return {
        key: value
        for key, value in item.items()
        if (key in _FORWARD_KEYS or key.startswith("multi_modal"))
        and not is_in_pieces(value)
    }


def whole_items(batch: PlannedBatch, num_ranks: int) -> list[list[int]]:
    """Items in depth-first order, cut evenly by tokens: without waiting for the plan,
    much of an item goes to the rank that will train it, which fetches it anyway."""
    tokens: dict[int, int] = {}
    lengths = batch.leaves.order.length_N.tolist()
    for (item, _), length in zip(batch.leaves.owners, lengths, strict=True):
        tokens[item] = tokens.get(item, 0) + length
    total, before = sum(tokens.values()), 0
    numbers: list[list[int]] = [[] for _ in range(num_ranks)]
    for item, num in tokens.items():
        middle = before + num / 2
        numbers[min(num_ranks - 1, int(middle * num_ranks / total))].append(item)
        before += num
    return numbers


def _balanced(
    items: Sequence[Item], num_ranks: int, group_size: int
) -> list[list[int]]:
    """Groups of consecutive items, the largest first to the rank with the least."""
    if len(items) % group_size:
        raise ValueError(
            f"item count ({len(items)}) must be divisible by group_size ({group_size})"
        )
    groups = [range(i, i + group_size) for i in range(0, len(items), group_size)]
    weights = [sum(_item_weight(items[i]) for i in group) for group in groups]
    loads, indices = [0] * num_ranks, [[] for _ in range(num_ranks)]  # type: ignore[var-annotated]
    for g in sorted(range(len(groups)), key=lambda g: -weights[g]):
        rank = loads.index(min(loads))
        loads[rank] += weights[g]
        indices[rank] += groups[g]
    return indices
