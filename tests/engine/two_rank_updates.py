"""Engines, and whole updates of every algorithm as AReaL's trainers make them."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from areal.api.cli_args import (
    DPOEngineConfig,
    NormConfig,
    PPOCriticConfig,
    TrainEngineConfig,
)

from areal_dta.config.engine_options import DTAOptions
from areal_dta.config.schema import DTAPPOActorConfig
from areal_dta.engine import (
    DTADPOEngine,
    DTALMEngine,
    DTAPPOActor,
    DTAPPOCritic,
    DTARWEngine,
)
from tests.engine.builders import (
    actor_config,
    build_engine,
    engine_config,
    parameters,
    value_config,
)

SMALL_BLOCKS = SimpleNamespace(block_tokens=4, retain_tokens=6)


def tree_engine(
    model: Path,
    router_load: bool = False,
    self_check: bool = True,
    router_aux_loss: float = 0.0,
    **overrides: Any,
) -> Any:
    config = actor_config(model, **overrides)
    dta = DTAOptions(
        block_tokens=4,
        retain_tokens=6,
        router_load=router_load,
        router_aux_loss=router_aux_loss,
        self_check=self_check,
    )
    return build_engine(DTAPPOActor, DTAPPOActorConfig(**vars(config), dta=dta))


def layerwise_engine(model: Path, **overrides: Any) -> Any:
    """Parameters resharded around every layer, ranks in step."""
    config: Any = actor_config(model, **overrides)
    config.dta = SimpleNamespace(block_tokens=4, retain_tokens=6, reshard="block")
    return build_engine(DTAPPOActor, config)


def actor_options(num_minibatches: int) -> dict[str, Any]:
    norm = NormConfig(mean_level="batch", std_level="batch", group_size=1)
    return {
        "adv_norm": norm,
        "reward_norm": norm,
        "ppo_n_minibatches": num_minibatches,
    }


def actor_update(engine: Any, items: list[dict]) -> dict:
    """A whole step as AReaL's trainer does it."""
    logp = engine.compute_logp(items)
    for item, values in zip(items, logp, strict=True):
        item["prox_logp"] = values
    items = engine.compute_advantages(items)
    advantages = [item["advantages"] for item in items]
    engine.ppo_update(items)
    return {
        "logp": list(logp),
        "advantages": advantages,
        "parameters": parameters(engine),
        "stats": engine.export_stats(),
    }


def critic_engine(model: Path) -> Any:
    config = value_config(PPOCriticConfig, model, dta=SMALL_BLOCKS)
    return build_engine(DTAPPOCritic, config)


def critic_update(engine: Any, items: list[dict]) -> dict:
    values = engine.compute_values(items)
    for item, of_item in zip(items, values, strict=True):
        item["values"] = of_item
        item["loss_mask"] = item["loss_mask"].roll(-1, -1)
        item["returns"] = of_item + torch.sin(torch.arange(of_item.shape[1]))
    engine.ppo_update(items)
    return after(engine) | {"values": list(values)}


def lm_update(model: Path, items: list[dict]) -> dict:
    config = engine_config(TrainEngineConfig, model, dta=SMALL_BLOCKS)
    engine = build_engine(DTALMEngine, config)
    engine.evaluate_lm(copy.deepcopy(items))
    engine.train_lm(items)
    return after(engine)


def dpo_update(model: Path, items: list[dict]) -> dict:
    config = engine_config(DPOEngineConfig, model, dta=SMALL_BLOCKS, beta=0.5)
    engine = build_engine(DTADPOEngine, config)
    for item, logp in zip(items, engine.compute_logp(items), strict=True):
        item["ref_logprobs"] = 0.9 * logp
    engine.evaluate_dpo(copy.deepcopy(items))
    engine.train_dpo(items)
    return after(engine)


def rw_update(model: Path, items: list[dict]) -> dict:
    config = value_config(TrainEngineConfig, model, dta=SMALL_BLOCKS)
    engine = build_engine(DTARWEngine, config)
    engine.evaluate_rw(copy.deepcopy(items))
    engine.train_rw(items)
    return after(engine)


def after(engine: Any) -> dict:
    return {"parameters": parameters(engine), "stats": engine.export_stats()}


def fused_update(model: Path, items: list[dict]) -> dict:
    """M2PO without a pass for the proximal logprobs."""
    engine = tree_engine(model, **actor_options(1), m2_threshold=0.05)
    engine.ppo_update(engine.compute_advantages(items))
    return after(engine)
