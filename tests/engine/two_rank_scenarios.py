"""What each of two ranks runs for test_two_ranks.py.

The directory holds the models `tiny`, `moe` and `critic`. Importing AReaL takes
seconds, so all scenarios share one pair of processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from areal.api import SaveLoadMeta
from areal.engine.fsdp_engine import FSDPPPOActor
from torch import nn
from torch.distributed.fsdp import fully_shard

from areal_dta.engine.fsdp_gather_step import PeerFailure, training_pass
from areal_dta.executor.block import BlockRunner
from tests.engine.builders import (
    actor_config,
    build_engine,
    full,
    one_sequence_each,
    parameters,
    rows_of,
)
from tests.engine.checks import grpo_loss, loss_tokens, train_once
from tests.engine.ranks import COLLECTIVE_TIMEOUT
from tests.engine.two_rank_data import lm_items, pair_items, trajectories, union
from tests.engine.two_rank_updates import (
    actor_options,
    actor_update,
    critic_engine,
    critic_update,
    dpo_update,
    fused_update,
    layerwise_engine,
    lm_update,
    rw_update,
    tree_engine,
)

LORA: dict[str, Any] = {
    "use_lora": True,
    "lora_rank": 4,
    "lora_alpha": 8,
    "target_modules": ["all-linear"],
}
UNEVEN = ([0, 1, 2, 3, 4, 5, 6], [7, 8])
EVEN = ([0, 2, 4, 6], [1, 3, 5, 7])


def run_all(rank: int, directory: Path) -> dict:
    scenarios = Scenarios(rank, directory)
    results = {}
    for name, method in vars(Scenarios).items():
        if not name.startswith("_"):
            print(f"scenario {name}", flush=True)
            results[name] = method(scenarios)
    return results


class ExpertModel(nn.Module):
    """Token n goes to expert n alone; token 0 is what reduces the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        expert = self.experts[int(input_ids[0, 0])]
        return SimpleNamespace(logits=expert(self.embed(input_ids)))


class Scenarios:
    """Each method runs on both ranks at once and returns what the test looks at."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank, self.directory = rank, directory
        self.model = directory / "tiny"

    def uneven_trees(self) -> dict:
        mine = rows_of(union(), UNEVEN[self.rank])
        return self._train_eval_forward(tree_engine(self.model), mine)

    def empty_list_on_rank_1(self) -> dict:
        mine = union() if self.rank == 0 else []
        return self._train_eval_forward(tree_engine(self.model), mine)

    def empty_rows_on_rank_0(self) -> dict:
        mine = union() if self.rank == 1 else rows_of(union(), [])
        return self._train_eval_forward(tree_engine(self.model), mine)

    def weightless_rows_on_rank_1(self) -> dict:
        mine = rows_of(union(), UNEVEN[self.rank])
        if self.rank == 1:
            mine["loss_mask"].zero_()
        return train_once(tree_engine(self.model), mine)

    def mixture_with_rank_1_empty(self) -> dict:
        mine = union() if self.rank == 0 else []
        engine = tree_engine(
            self.directory / "moe", router_load=True, router_aux_loss=0.1
        )
        return train_once(engine, mine)

    def stock_engine(self) -> dict:
        mine = rows_of(union(), EVEN[self.rank])
        spec = one_sequence_each(len(EVEN[0]))
        engine = build_engine(FSDPPPOActor, actor_config(self.model, mb_spec=spec))
        return train_once(engine, mine)

    def tree_engine_on_the_same_rows(self) -> dict:
        mine = rows_of(union(), EVEN[self.rank])
        return train_once(tree_engine(self.model), mine)

    def rank_1_fails_in_its_loss(self) -> dict:
        engine, mine = tree_engine(self.model), rows_of(union(), UNEVEN[self.rank])

        def failing_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
            raise ArithmeticError("no loss today")

        loss_fn = failing_loss if self.rank else grpo_loss()
        error = _error_of(lambda: engine.train_batch(mine, loss_fn, loss_tokens))
        return {"error": error, **train_once(engine, mine)}

    def rank_1_runs_out_of_memory(self) -> dict:
        """It fails once, in a block, and alone begins its step again."""
        engine = tree_engine(self.model, self_check=False)
        mine = rows_of(union(), UNEVEN[self.rank])
        run, calls = BlockRunner.run, []

        def failing_run(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if self.rank and len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(*args, **kwargs)

        BlockRunner.run = failing_run  # type: ignore[method-assign]
        try:
            results = train_once(engine, mine)
        finally:
            BlockRunner.run = run  # type: ignore[method-assign]
        return {**results, "retain_tokens": engine.runner.executor.config.retain_tokens}

    def uneven_trees_by_the_layer(self) -> dict:
        mine = rows_of(union(), UNEVEN[self.rank])
        return self._train_eval_forward(layerwise_engine(self.model), mine)

    def empty_list_on_rank_1_by_the_layer(self) -> dict:
        mine = union() if self.rank == 0 else []
        return self._train_eval_forward(layerwise_engine(self.model), mine)

    def adapters_with_rank_1_empty(self) -> dict:
        mine = union() if self.rank == 0 else []
        torch.manual_seed(0)
        return train_once(tree_engine(self.model, **LORA), mine)

    def adapters_by_the_layer(self) -> dict:
        mine = rows_of(union(), UNEVEN[self.rank])
        torch.manual_seed(0)
        return train_once(layerwise_engine(self.model, **LORA), mine)

    def rank_1_has_bad_rows(self) -> dict:
        engine, mine = tree_engine(self.model), rows_of(union(), UNEVEN[self.rank])
        bad = copy.deepcopy(mine)
        if self.rank:
            bad["attention_mask"][0, 0] = False
        error = _error_of(lambda: engine.forward_batch(bad))
        return {"error": error, **train_once(engine, mine)}

    def actor_with_rank_1_empty(self) -> dict:
        mine = trajectories() if self.rank == 0 else []
        return actor_update(tree_engine(self.model, **actor_options(2)), mine)

    def actor_with_uneven_items(self) -> dict:
        items = trajectories()
        mine = items[:2] if self.rank == 0 else items[2:]
        return actor_update(tree_engine(self.model, **actor_options(1)), mine)

    def critic_with_uneven_items(self) -> dict:
        items = trajectories()
        mine = items[:2] if self.rank == 0 else items[2:]
        return critic_update(critic_engine(self.directory / "critic"), mine)

    def critic_with_rank_1_empty(self) -> dict:
        mine = trajectories() if self.rank == 0 else []
        return critic_update(critic_engine(self.directory / "critic"), mine)

    def lm_with_uneven_items(self) -> dict:
        items = lm_items()
        return lm_update(self.model, items[:2] if self.rank == 0 else items[2:])

    def lm_with_rank_0_empty(self) -> dict:
        return lm_update(self.model, lm_items() if self.rank == 1 else [])

    def dpo_with_uneven_items(self) -> dict:
        items = pair_items()
        return dpo_update(self.model, items[:2] if self.rank == 0 else items[2:])

    def dpo_with_rank_1_empty(self) -> dict:
        return dpo_update(self.model, pair_items() if self.rank == 0 else [])

    def rw_with_uneven_items(self) -> dict:
        items = pair_items(False)
        mine = items[:2] if self.rank == 0 else items[2:]
        return rw_update(self.directory / "critic", mine)

    def rw_with_rank_1_empty(self) -> dict:
        mine = pair_items(False) if self.rank == 0 else []
        return rw_update(self.directory / "critic", mine)

    def fused_with_rank_1_empty(self) -> dict:
        return fused_update(self.model, trajectories() if self.rank == 0 else [])

    def experts_that_one_token_does_not_reach(self) -> dict:
        torch.manual_seed(0)
        model = ExpertModel()
        for expert in model.experts:
            fully_shard(expert)
        fully_shard(model)
        group = dist.new_group(timeout=COLLECTIVE_TIMEOUT)
        with training_pass(model, group):
            for _ in range(2 * (1 - self.rank)):  # rank 1 has nothing to do
                model(torch.tensor([[3]]), use_cache=False).logits.sum().backward()
        return {name: full(p.grad).clone() for name, p in model.named_parameters()}

    def checkpoint(self) -> dict:
        engine = tree_engine(self.model)
        train_once(engine, rows_of(union(), UNEVEN[self.rank]))
        for weight_format in ("hf", "dcp"):
            path = str(self.directory / weight_format)
            engine.save(
                SaveLoadMeta(path, weight_format, False, engine.tokenizer, None)
            )
        return {"parameters": parameters(engine)}

    def _train_eval_forward(self, engine: Any, mine: Any) -> dict:
        forward = engine.forward_batch(mine)
        loss = engine.eval_batch(mine, grpo_loss(), loss_tokens)
        eval_stats = engine.export_stats()
        return {
            "forward": forward,
            "eval": loss,
            "eval_stats": eval_stats,
            **train_once(engine, mine),
            "forward_after": engine.forward_batch(mine),
        }


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ArithmeticError, ValueError, PeerFailure) as error:
        return f"{type(error).__name__}: {error}"
    return "none"
