"""Ranks that dispatch batches to themselves, for test_row_dispatch.py.

The directory holds the models `tiny` and `critic`. Each rank runs the whole controller,
and its own worker's part of each call: results are gathered.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from areal.api.cli_args import MicroBatchSpec, NormConfig, PPOCriticConfig

from areal_dta.collector.controllers import DTAActorController, DTACriticController
from areal_dta.config.engine_options import DTAOptions
from areal_dta.config.schema import DTAPPOActorConfig
from areal_dta.engine import (
    DensePPOActor,
    DensePPOCritic,
    DTAPPOActor,
    DTAPPOCritic,
)
from tests.engine.builders import (
    VOCAB_SIZE,
    actor_config,
    build_engine,
    parameters,
    value_config,
)

GROUP = {"mean_level": "group", "std_level": "group", "group_size": 3}
NORMS = {
    "reward_norm": NormConfig(**GROUP, mean_leave1out=True),
    "adv_norm": NormConfig(mean_level="group", std_level="batch", group_size=3),
}

BATCHES: dict[str, tuple[int, ...]] = {
    "equal": (3, 3, 3),
    "unequal": (3, 1, 4, 2, 2),
    "one_item": (4,),
    "one_row": (1,),
    "two_items": (2, 3),
}
"""Rows of each item."""


def make_items(sizes: Sequence[int], seed: int = 0) -> list[dict]:
    """Items as they come from the rollout, each as wide as its longest row.

    Every item of three rows or more holds a duplicate, and a strict prefix of it.
    """
    rng = np.random.default_rng(seed)
    items = []
    for size in sizes:
        prompt = rng.integers(2, VOCAB_SIZE, int(rng.integers(3, 8))).tolist()
        rows = []
        for _ in range(size):
            tail = rng.integers(2, VOCAB_SIZE, int(rng.integers(2, 9))).tolist()
            rows.append(prompt + tail)
        if size >= 3:
            rows[1], rows[2] = rows[0], rows[0][:-1]
        items.append(_item(rows, len(prompt), rng))
    return items


def _item(rows: list[list[int]], num_prompt: int, rng: Any) -> dict:
    shape = (len(rows), max(map(len, rows)))
    item = {
        "input_ids": torch.zeros(shape, dtype=torch.int32),
        "attention_mask": torch.zeros(shape, dtype=torch.bool),
        "loss_mask": torch.zeros(shape, dtype=torch.int32),
        "logprobs": torch.zeros(shape),
        "versions": torch.full(shape, -1, dtype=torch.int32),
        "rewards": torch.tensor(rng.integers(0, 2, len(rows)), dtype=torch.float32),
    }
    for i, row in enumerate(rows):
        answer = slice(num_prompt, len(row))
        noise = torch.tensor(rng.normal(0, 0.2, len(row) - num_prompt))
        item["input_ids"][i, : len(row)] = torch.tensor(row)
        item["attention_mask"][i, : len(row)] = True
        item["loss_mask"][i, answer] = 1
        item["logprobs"][i, answer] = (-4 + noise).float()
        item["versions"][i, answer] = 0
    return item


def tree_actor(model: Path, **overrides: Any) -> Any:
    config = actor_config(model, **NORMS, **overrides)
    dta = DTAOptions(block_tokens=4, retain_tokens=6)
    return build_engine(DTAPPOActor, DTAPPOActorConfig(**vars(config), dta=dta))


def dense_actor(model: Path, **overrides: Any) -> Any:
    return build_engine(DensePPOActor, actor_config(model, **NORMS, **overrides))


def critic(engine_class: Any, model: Path) -> Any:
    return build_engine(engine_class, value_config(PPOCriticConfig, model))


class _Spmd:
    """Calls its own engine, and gathers what the other ranks' returned."""

    def __init__(self, engine: Any) -> None:
        config = copy.copy(engine.config)
        config.backend = f"fsdp:d{dist.get_world_size()}"
        super().__init__(type(engine), config, None)  # type: ignore[call-arg]
        self.engine = engine
        self.workers_is_dp_head = [True] * dist.get_world_size()

    async def _call_workers(
        self, method: str, args: list, kwargs: dict, rpc_meta: Any = None
    ) -> list:
        rank = dist.get_rank()
        mine = copy.deepcopy([of_ranks[rank] for of_ranks in args])
        result = getattr(self.engine, method)(*mine)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, result, group=self.engine.cpu_group)
        return everyone


class SpmdActor(_Spmd, DTAActorController):
    pass


class SpmdCritic(_Spmd, DTACriticController):
    pass


def actor_step(actor: Any, items: list[dict], engine: Any = None) -> dict:
    """A whole step as AReaL's trainer does it, on a controller or on an engine."""
    engine = engine or actor.engine
    items = [dict(item) for item in items]
    for item, value in zip(items, actor.compute_logp(items), strict=True):
        item["prox_logp"] = value
    batch = actor.compute_advantages(items)
    actor.ppo_update(batch)
    return {
        "advantages": [item["advantages"] for item in batch],
        "returns": [item["returns"] for item in batch],
        "parameters": parameters(engine),
        "stats": engine.export_stats(),
    }


def critic_step(critic: Any, items: list[dict], engine: Any = None) -> dict:
    from areal_dta.engine.row_share import join_pieces

    engine = engine or critic.engine
    items = [dict(item) for item in items]
    for item, value in zip(items, critic.compute_values(items), strict=True):
        item["values"] = value
    items = [join_pieces(item) for item in items]
    for item in items:
        item["loss_mask"] = item["loss_mask"].roll(-1, -1)
        item["returns"] = item["values"] + torch.sin(
            torch.arange(item["values"].shape[1])
        )
    values = [item["values"].clone() for item in items]
    critic.ppo_update(items)
    return {
        "values": values,
        "parameters": parameters(engine),
        "stats": engine.export_stats(),
    }


def run_all(rank: int, directory: Path) -> dict:
    tiny = directory / "tiny"
    results: dict[str, Any] = {}
    for name, sizes in BATCHES.items():
        print(f"batch {name}", flush=True)
        items = make_items(sizes)
        results[f"tree/{name}"] = actor_step(SpmdActor(tree_actor(tiny)), items)
    for name in ("unequal", "one_row"):
        spec = MicroBatchSpec(max_tokens_per_mb=24)
        engine = dense_actor(tiny, mb_spec=spec)
        results[f"dense/{name}"] = actor_step(
            SpmdActor(engine), make_items(BATCHES[name])
        )
        for kind, cls in (("tree", DTAPPOCritic), ("dense", DensePPOCritic)):
            values = SpmdCritic(critic(cls, directory / "critic"))
            results[f"{kind}_critic/{name}"] = critic_step(
                values, make_items(BATCHES[name])
            )
    items = make_items(BATCHES["unequal"])
    minibatches = SpmdActor(tree_actor(tiny, ppo_n_minibatches=2))
    results["minibatches"] = actor_step(minibatches, items)
    shuffled = list(items)
    for seed in range(3):
        random.Random(seed).shuffle(shuffled)
        results[f"order/{seed}"] = actor_step(SpmdActor(tree_actor(tiny)), shuffled)
    return results
