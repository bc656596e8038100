"""What the tree engine refuses or switches off, told before anything heavy starts.

``check_actor_config`` reads the configuration alone and imports nothing of AReaL, so
the launcher can call it first; ``check_model_config`` needs the Hugging Face config.
"""

from __future__ import annotations

import copy
import re
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")

_ATTENTION_FOR_LOADING = ("sdpa", "eager")  # need no extra package
_DIMENSIONS = {
    "t": "tensor",
    "p": "pipeline",
    "c": "context",
    "e": "expert",
}
# The names under which Transformers' decoder configs keep a dropout probability.
_DROPOUT_FIELDS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_pdrop",
)


def check_actor_config(config: Any) -> list[str]:
    """Check the configuration of an actor (or reference) on the tree engine.

    Returns:
        One message for each setting that the engine switches off.

    Raises:
        ValueError: a setting cannot be honoured; the message names every such one,
            what was got and what to do.
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
    """A shallow copy with what ``check_actor_config`` reports switched off."""
    config = copy.copy(config)
    values: Any = config
    values.gradient_checkpointing = False
    values.pad_to_maximum = False
    if values.attn_impl not in _ATTENTION_FOR_LOADING:
        values.attn_impl = "sdpa"
    if isinstance(values.backend, str) and values.backend.startswith("dta:"):
        values.backend = "fsdp:" + values.backend.removeprefix("dta:")
    return config


def check_model_config(hf_config: Any, disable_dropout: bool) -> list[str]:
    """Check the configuration of a model for dropout.

    A tree token is computed once for all sequences through it, so they would share
    one dropout mask, and a recomputed block would draw another.

    Returns:
        One message for each setting that the engine switches off.

    Raises:
        ValueError: the model has dropout and ``disable_dropout`` is not set.
    """
    found = [
        f"{name}={getattr(hf_config, name)}"
        for name in _DROPOUT_FIELDS
        if getattr(hf_config, name, None)
    ]
    if not found:
        return []
    if not disable_dropout:
        raise ValueError(
            f"the model has dropout ({', '.join(found)}), which the tree engine cannot "
            "apply: set actor.disable_dropout=true, or use actor.backend=fsdp:dN"
        )
    return [f"dropout of the model ({', '.join(found)}) is switched off"]


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
        f"dta.reshard={_option(config, 'reshard', 'step')}: expected step (parameters "
        "gathered for a step) or block (for every layer, ranks in step)": (
            _option(config, "reshard", "step") not in ("step", "block")
        ),
        "fp8: a feature of AReaL's Megatron and Archon engines; leave "
        "megatron.fp8_config empty and archon.fp8_config.mode=disabled": (
            config.megatron.fp8_config is not None or config.archon.fp8_config.enabled
        ),
        "m2_threshold with dta.loss_scope=sequence: M2PO masks across the whole "
        "micro-batch; leave the scope at auto": (
            getattr(config, "m2_threshold", None) is not None
            and _option(config, "loss_scope", "auto") == "sequence"
        ),
        f"temperature={config.temperature}: expected a number above 0": (
            config.temperature <= 0
        ),
    }
    return [message for message, is_set in refused.items() if is_set]


def _option(config: Any, name: str, default: Any) -> Any:
    return getattr(getattr(config, "dta", None), name, default)
