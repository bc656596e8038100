"""What the tree engine asks of a model's modules."""

from __future__ import annotations

import copy
from typing import Any

import torch
from areal.api.cli_args import TrainEngineConfig
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from areal_dta.executor import check_model_supported
from areal_dta.executor.telemetry import RouterLoad
from areal_dta.tree import PrefixTree


def counts_experts(config: TrainEngineConfig) -> bool:
    """Whether ``dta.router_load`` is set."""
    return bool(getattr(getattr(config, "dta", None), "router_load", False))


def check_architecture(hf_config: Any, config: TrainEngineConfig) -> None:
    """Refuse a model by its modules, before its weights are loaded."""
    hf_config = copy.deepcopy(hf_config)
    auto: Any = AutoModelForCausalLM
    if config.is_critic:
        auto, hf_config.num_labels = AutoModelForTokenClassification, 1
    with torch.device("meta"):
        model = auto.from_config(hf_config, trust_remote_code=True)
    check_model_supported(model, training=False)
    if counts_experts(config):
        RouterLoad(model, PrefixTree.from_sequences([]))  # raises if there are none
    rates = {
        f"{name} (p={module.p})"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Dropout) and module.p
    }
    if rates and not config.disable_dropout:
        raise ValueError(
            f"{type(model).__name__} has dropout: {', '.join(sorted(rates))}; a tree "
            "token is computed once for all sequences through it, so they would share "
            "one mask: set disable_dropout=true, or use backend fsdp:dN"
        )


def zero_dropout_rates(model: torch.nn.Module) -> None:
    """Also of what AReaL does not reach: attention keeps its rate aside."""
    config: Any = model.config
    owners: list[tuple[Any, dict[str, Any]]] = [(config, config.to_dict())]
    owners += [(module, vars(module)) for module in model.modules()]
    for owner, fields in owners:
        for name in [n for n in fields if "dropout" in n or n.endswith("pdrop")]:
            if isinstance(fields[name], float):
                setattr(owner, name, 0.0)
