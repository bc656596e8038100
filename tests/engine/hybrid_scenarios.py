"""What each rank runs for test_hybrid_ranks.py: layers with a state, sharded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from areal_dta.engine.fsdp_gather_layer import LayerwiseGather
from areal_dta.engine.fsdp_gather_step import forward_pass, training_pass
from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.tree import PrefixTree
from tests.engine.gather_layer_scenarios import (
    BUDGETS,
    full_batch,
    loss_of,
    rows_of_rank,
)
from tests.engine.ranks import COLLECTIVE_TIMEOUT
from tests.models import HYBRIDS, tiny_model

SPLITS = ("uneven", "empty", "first_empty")
GATHERS = ("step", "block")
QUICK = ("qwen3_5_text", "lfm2", "mamba2")
FAMILIES = {
    "delta": ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"),
    "convolutions": ("lfm2", "lfm2_moe"),
    "mamba": ("mamba2", "bamba", "falcon_h1", "nemotron_h"),
    "granite": ("granitemoehybrid", "granitemoehybrid-experts"),
}
assert {name for names in FAMILIES.values() for name in names} == set(HYBRIDS)

QUICK_KEYS = [(name, "step", split, "some") for name in QUICK for split in SPLITS]


def sweep_keys(family: str) -> list[tuple[str, str, str, str]]:
    """Return (model, gather, split, budgets): every budget, and every empty rank."""
    return [
        (name, gather, split, budgets)
        for name in FAMILIES[family]
        for gather in GATHERS
        for split in SPLITS
        for budgets in BUDGETS
        if split == "uneven" or budgets == "some"
    ]


def hybrid(name: str) -> Any:
    return tiny_model(name, torch.float64)


def run_quick(rank: int, directory: Path) -> dict[str, Any]:
    return _run(rank, QUICK_KEYS)


def run_delta(rank: int, directory: Path) -> dict[str, Any]:
    return _run(rank, sweep_keys("delta"))


def run_convolutions(rank: int, directory: Path) -> dict[str, Any]:
    return _run(rank, sweep_keys("convolutions"))


def run_mamba(rank: int, directory: Path) -> dict[str, Any]:
    return _run(rank, sweep_keys("mamba"))


def run_granite(rank: int, directory: Path) -> dict[str, Any]:
    return _run(rank, sweep_keys("granite"))


def _run(rank: int, keys: list[tuple[str, str, str, str]]) -> dict[str, Any]:
    group = dist.new_group(timeout=COLLECTIVE_TIMEOUT, backend="gloo")
    results = {}
    for key in keys:
        print(*key, flush=True)
        results[" ".join(key)] = _train_and_forward(rank, group, *key)
    return results


def _train_and_forward(
    rank: int, group: Any, name: str, gather: str, split: str, budgets: str
) -> dict[str, Any]:
    model = _sharded(hybrid(name))
    executor = TreeExecutor(model, ExecutorConfig(*BUDGETS[budgets]))
    training, forward = _passes(executor, gather, group)
    rows = rows_of_rank(split, rank, dist.get_world_size())
    tree = PrefixTree.from_sequences([full_batch()[r] for r in rows])
    with forward:
        outputs = executor.forward(tree)
    with training:
        loss = executor.forward_backward(tree, loss_of(rows))
    grads = {}
    for parameter_name, p in model.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor), parameter_name
        grads[parameter_name] = p.grad.full_tensor().clone()
    logprobs = {row: x.logprobs for row, x in zip(rows, outputs, strict=True)}
    return {"loss": loss, "gradients": grads, "logprobs": logprobs}


def _passes(
    executor: TreeExecutor, gather: str, group: Any
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a training and of a forward-only pass."""
    model = executor.model
    if gather == "step":
        return training_pass(model, group), forward_pass(model, group)
    pace = LayerwiseGather(model, group)
    executor.pace = pace
    return pace.training_pass(), pace.forward_pass()


def _sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if not model.config.tie_word_embeddings:
        fully_shard(model.get_input_embeddings(), **options)
    for layer in model.base_model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model
