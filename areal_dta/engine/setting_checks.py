"""Settings that the tree engine refuses or switches off.

`check_actor_config` reads the configuration alone and imports neither AReaL nor torch,
so that the launcher can call it first. Which models are refused:
`areal_dta.executor.model_refusals`. LoRA is not: `areal_dta.config.lora`.
"""

from __future__ import annotations

import copy
import re
from typing import Any, TypeVar

from areal_dta.config.engine_options import DTAOptions, router_aux_coefficient

ConfigT = TypeVar("ConfigT")

_ATTENTION_FOR_LOADING = ("sdpa", "eager")  # need no extra package
_DIMENSIONS = {"t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


def option(config: Any, name: str) -> Any:
    """Return ``config.dta.<name>``, or its default in a configuration without it."""
    return getattr(getattr(config, "dta", None), name, getattr(DTAOptions, name))


def check_actor_config(config: Any) -> list[str]:
    """Check the configuration of any engine on trees.

    Returns:
        One message per setting that the engine switches off.

    Raises:
        ValueError: settings cannot be honoured; the message names each of them, what
            was got and what to do.
    """
    problems = [
        *_parallel_problems(str(getattr(config, "backend", "") or "")),
        *_feature_problems(config),
    ]
    if problems:
        listed = " ".join(f"({n}) {text}" for n, text in enumerate(problems, start=1))
        detail = problems[0] if len(problems) == 1 else listed
        raise ValueError(f"the tree engine cannot run this: {detail}")
    messages = []
    if config.gradient_checkpointing:
        messages.append(
            "gradient_checkpointing=true is switched off: the tree engine bounds "
            "activation memory by dta.block_tokens and dta.retain_tokens instead"
        )
    if config.attn_impl not in _ATTENTION_FOR_LOADING:
        messages.append(
            f"attn_impl={config.attn_impl} is not used by the tree engine, which has "
            "its own attention; the model is loaded with sdpa"
        )
    if config.pad_to_maximum:
        messages.append(
            "pad_to_maximum=true is switched off: the tree engine does not pad"
        )
    return messages


def effective_config(config: ConfigT) -> ConfigT:
    """Return a shallow copy with what `check_actor_config` reports switched off."""
    config = copy.copy(config)
    values: Any = config
    values.gradient_checkpointing = False
    values.pad_to_maximum = False
    if values.attn_impl not in _ATTENTION_FOR_LOADING:
        values.attn_impl = "sdpa"
    if isinstance(values.backend, str) and values.backend.startswith("dta:"):
        values.backend = "fsdp:" + values.backend.removeprefix("dta:")
    return config


def router_aux_loss(config: Any, hf_config: Any) -> tuple[float, list[str]]:
    """Return the coefficient of the routers' auxiliary loss, and a message if the
    model's configuration asks for one that is not trained."""
    if config.optimizer is None:
        return 0.0, []
    asked = router_aux_coefficient("auto", hf_config)
    coefficient = router_aux_coefficient(option(config, "router_aux_loss"), hf_config)
    if coefficient or not asked:
        return coefficient, []
    return 0.0, [
        "the model's configuration asks for its routers' auxiliary loss (coefficient "
        f"{asked:g}), which AReaL leaves out; dta.router_aux_loss=auto adds it"
    ]


def zero_dropout_rates(model: Any) -> None:
    """Set every dropout rate to 0, also where attention modules keep their own, which
    AReaL's ``disable_dropout`` does not reach."""
    owners: list[tuple[Any, dict[str, Any]]] = [(model.config, model.config.to_dict())]
    owners += [(module, vars(module)) for module in model.modules()]
    for owner, fields in owners:
        for name in [n for n in fields if "dropout" in n or n.endswith("pdrop")]:
            if isinstance(fields[name], float):
                setattr(owner, name, 0.0)


def _parallel_problems(backend: str) -> list[str]:
    if not backend or backend == "???":  # OmegaConf's mark of a missing value
        return []
    name, _, sizes = backend.partition(":")
    if name not in ("dta", "fsdp"):
        return [f"backend={backend}: expected dta:dN, N being the number of trainers"]
    problems = []
    for letter, size in re.findall(r"([a-z])(\d+)", sizes):
        if letter in _DIMENSIONS and int(size) > 1:
            problems.append(
                f"backend={backend} asks for {_DIMENSIONS[letter]} parallelism of "
                f"{size}: only data parallelism is supported; use dta:dN"
            )
    return problems


def _feature_problems(config: Any) -> list[str]:
    refused = {
        "enable_tree_training=true: this is AReaL's own tree attention, which excludes "
        "ours; leave it false (backend dta:dN shares prefixes by itself)": (
            config.enable_tree_training
        ),
        f"_version={config._version}: AReaL's v2 controllers do not go through this "
        "engine; use _version=v1": config._version != "v1",
        "use_kernels=true: kernels that replace the model's layers are not tested "
        "with the tree engine; set it false": config.use_kernels,
        "fsdp.offload_params=true: parameters must stay on the device through a tree; "
        "set it false": config.fsdp.offload_params,
        "fsdp.per_layer_optim_step=true: not tested with the tree engine; set it "
        "false": config.fsdp.per_layer_optim_step,
        "fp8: a feature of AReaL's Megatron and Archon engines; leave "
        "megatron.fp8_config empty and archon.fp8_config.mode=disabled": (
            config.megatron.fp8_config is not None or config.archon.fp8_config.enabled
        ),
        "m2_threshold with dta.loss_scope=sequence: M2PO masks across the whole "
        "micro-batch; leave the scope at auto": (
            getattr(config, "m2_threshold", None) is not None
            and option(config, "loss_scope") == "sequence"
        ),
        f"temperature={config.temperature}: expected a number above 0": (
            config.temperature <= 0
        ),
    }
    return [message for message, is_set in refused.items() if is_set]
