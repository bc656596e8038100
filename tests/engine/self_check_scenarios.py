"""What each of two ranks runs for test_self_check.py: with the self-check and without.

The directory holds the models `tiny`, `moe` and `critic`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from areal.api.cli_args import OptimizerConfig, PPOCriticConfig

from areal_dta.config.engine_options import DTAOptions
from areal_dta.config.schema import DTAPPOActorConfig
from areal_dta.engine import DTAPPOActor, DTAPPOCritic, oom_retry
from areal_dta.executor import UnsupportedModelError
from areal_dta.executor import attention as attention_module
from tests.engine.builders import (
    actor_config,
    build_engine,
    full,
    parameters,
    rows_of,
    value_config,
)
from tests.engine.checks import train_once
from tests.engine.two_rank_data import trajectories, union
from tests.engine.two_rank_scenarios import LORA, UNEVEN
from tests.engine.two_rank_updates import critic_update

ADAM = {"lr": 1e-2, "lr_scheduler_type": "constant", "warmup_steps_proportion": 0.0}
RESHARD = ("step", "block")
MODELS = ("tiny", "lora", "moe", "critic")


def run_all(rank: int, directory: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for reshard in RESHARD:
        for model in MODELS:
            print(f"{model}-{reshard}", flush=True)
            results[f"{model}-{reshard}"] = [
                _train(directory, rank, model, reshard, on) for on in (True, False)
            ]
        print(f"faults, {reshard}", flush=True)
        results[f"fault-{reshard}"] = _with_fault(directory, rank, reshard)
    results["crash"] = _with_crash(directory, rank)
    return results


def _build(directory: Path, model: str, reshard: str, is_on: bool) -> Any:
    dta = DTAOptions(block_tokens=4, retain_tokens=6, reshard=reshard, self_check=is_on)
    optimizer = OptimizerConfig(type="adam", **ADAM)  # type: ignore[arg-type]
    if model == "critic":
        path = directory / "critic"
        config = value_config(PPOCriticConfig, path, dta=dta, optimizer=optimizer)
        return build_engine(DTAPPOCritic, config)
    options = LORA if model == "lora" else {}
    path = directory / ("moe" if model == "moe" else "tiny")
    base = actor_config(path, optimizer=optimizer, **options)
    torch.manual_seed(0)  # adapters are random
    return build_engine(DTAPPOActor, DTAPPOActorConfig(**vars(base), dta=dta))


def _train(directory: Path, rank: int, model: str, reshard: str, is_on: bool) -> Any:
    """Two updates; in the second, rank 1 has no rows."""
    engine, calls, states = _build(directory, model, reshard, is_on), [], []
    original = oom_retry.check_on_tiny_tree

    def counted(executor: Any) -> None:
        before = torch.random.get_rng_state()
        original(executor)
        calls.append(1)
        states.append(torch.equal(torch.random.get_rng_state(), before))
        assert all(p.grad is None for p in engine.model.parameters())

    oom_retry.check_on_tiny_tree = counted
    try:
        if model == "critic":
            items = trajectories()
            mine = items[:2] if rank == 0 else items[2:]
            updates = [critic_update(engine, copy.deepcopy(mine)) for _ in range(2)]
        else:
            batches: Any = [rows_of(union(), UNEVEN[rank]), [] if rank else union()]
            updates = [train_once(engine, batch) for batch in batches]
    finally:
        oom_retry.check_on_tiny_tree = original
    found: dict[str, torch.Tensor] = {}
    for step, update in enumerate(updates):
        for kind in ("parameters", "gradients"):
            for name, tensor in update.get(kind, {}).items():
                found[f"{step} {kind} {name}"] = tensor
        for name, value in update["stats"].items():
            if "time" not in name and "seconds" not in name:
                found[f"{step} {name}"] = torch.tensor(value, dtype=torch.float64)
    for index, state in enumerate(engine.optimizer.state.values()):
        for name, value in state.items():
            found[f"optimizer {index} {name}"] = full(value).detach().clone()
    return {"calls": len(calls), "rng_kept": all(states), "found": found}


def _with_fault(directory: Path, rank: int, reshard: str) -> dict[str, Any]:
    """Rank 1 alone computes attention otherwise; then it is mended and all train."""
    engine = _build(directory, "tiny", reshard, True)
    before = parameters(engine)
    batch = rows_of(union(), UNEVEN[rank])
    original = attention_module.attend

    def attend(block: Any, layer: int, asked: Any, query: Any, *args: Any) -> Any:
        return original(block, layer, asked, query * (1 + 0.1 * layer * rank), *args)

    attention_module.attend = attend
    error = "none"
    try:
        train_once(engine, batch)
    except UnsupportedModelError as caught:
        error = str(caught)
    finally:
        attention_module.attend = original
    after = parameters(engine)
    is_kept = all(torch.equal(after[n], before[n]) for n in before)
    return {"error": error, "kept": is_kept, **train_once(engine, batch)}


def _with_crash(directory: Path, rank: int) -> str:
    """Rank 1 fails otherwise in its check, where ranks do not wait within a pass."""
    engine = _build(directory, "tiny", "step", True)
    original = oom_retry.check_on_tiny_tree

    def crash(executor: Any) -> None:
        if rank:
            raise ArithmeticError("no check today")
        original(executor)

    oom_retry.check_on_tiny_tree = crash
    try:
        train_once(engine, rows_of(union(), UNEVEN[rank]))
    except (UnsupportedModelError, ArithmeticError) as caught:
        return f"{type(caught).__name__}: {caught}"
    finally:
        oom_retry.check_on_tiny_tree = original
    return "none"
