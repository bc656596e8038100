"""A model is refused here: which models, and why. They cannot be split at a prefix.

Exact are decoders whose layers mix tokens only in causal softmax attention, with
positions that depend on the token's depth alone, or by a state that executor.states
knows. Every other model is refused by name:
at start-up where the config tells, else at the first block. Nothing is silently
ignored: test_model_refusals.py.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from areal_dta.executor.checks.multimodal import (
    auto_class,
    has_text_part,
    is_multimodal,
    text_inputs,
    text_modules,
)
from areal_dta.executor.routers import RouterLoad, find_routers
from areal_dta.executor.states.kinds import stateful_layers, why_unknown
from areal_dta.tree import PrefixTree

# What a layer may ask its attention for; attention.py serves it.
_SERVED = frozenset({"sliding_window", "softcap", "s_aux"})
# Keyword arguments of attention calls that change nothing here: bookkeeping, or facts
# about packing and caches that do not apply to a block. (Nemotron-H means use_cache.)
_HARMLESS = frozenset(
    "position_ids position_embeddings cache_position use_cache past_key_values "
    "output_attentions output_hidden_states output_router_logits return_dict "
    "user_cache num_items_in_batch logits_to_keep cu_seq_lens_q cu_seq_lens_k "
    "max_length_q max_length_k".split()
)
_SPLITTABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_STATEFUL_LAYERS = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
"""Layer types whose modules executor.states may know."""
_REFUSED_ROPE = ("dynamic", "longrope")
REMEDY = "use the dense engine (actor.backend=fsdp:…) for this model"


class UnsupportedModelError(ValueError):
    """The model cannot be trained on prefix trees without changing its result."""


def check_model_supported(model: nn.Module, training: bool = True) -> None:
    """Refuse what the config or the modules already show to be impossible.

    Raises:
        UnsupportedModelError: names the model, the reason and the remedy.
    """
    config: Any = getattr(model, "config", None)
    stateful = stateful_layers(model)
    if config is None:
        reasons = ["it has no Hugging Face config"]
    else:
        reasons = _config_reasons(config, has_states=bool(stateful))
    peft_config = getattr(model, "active_peft_config", None)
    if getattr(peft_config, "is_prompt_learning", False):
        reasons.append("prompt or prefix tuning adds virtual tokens to every call")
    if (why := why_unknown(model)) is not None:
        reasons.append(why)
    known = {id(m) for layer in stateful for m in layer.module.modules()}
    for path, module in text_modules(model).items():
        if isinstance(module, nn.RNNBase | nn.Conv1d) and id(module) not in known:
            kind = type(module).__name__
            reasons.append(f"{path} ({kind}) mixes tokens outside attention")
            break
    name = getattr(config, "_attn_implementation", None)
    if isinstance(name, str) and _is_users_attention(name):
        reasons.append(
            f"attn_implementation={name!r} is an attention function of its own"
        )
    if training:
        reasons += _training_reasons(model)
    if reasons:
        raise UnsupportedModelError(
            f"{class_name(model)} cannot be trained on prefix trees: "
            f"{'; '.join(reasons)}; {REMEDY}"
        )


def _is_users_attention(name: str) -> bool:
    """Return whether a name was registered by someone else than Transformers.

    Its functions, and kernels from the Hub ("/" in the name), compute one attention.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or "transformers"
    is_known = module.partition(".")[0] in ("transformers", "areal_dta", "areal")
    return not is_known and "/" not in name


def check_unloaded_model(
    hf_config: Any,
    *,
    is_critic: bool = False,
    trains: bool = True,
    disable_dropout: bool = False,
    router_load: bool = False,
    router_aux_loss: bool = False,
) -> list[str]:
    """Check a model by its configuration and its modules, before weights are loaded.

    Args:
        is_critic: it gives one value per token.
        trains: it will be trained; otherwise its noise does no harm.
        disable_dropout: dropout is switched off once it is loaded.
        router_load: the tokens of its experts will be counted.
        router_aux_loss: it is trained with its routers' auxiliary loss.

    Returns:
        A message if its dropout is switched off.

    Raises:
        UnsupportedModelError: the model cannot be split at a prefix.
        ValueError: it has noise, or dropout that stays, or no experts to count.
    """
    hf_config = copy.deepcopy(hf_config)
    auto: Any = auto_class(hf_config)
    if is_critic:
        if is_multimodal(hf_config):
            raise ValueError(
                f"a multimodal checkpoint ({hf_config.model_type}) cannot be "
                "trained to give values: take one of text alone"
            )
        auto, hf_config.num_labels = AutoModelForTokenClassification, 1
    with torch.device("meta"):  # the modules, without memory for weights
        model = auto.from_config(hf_config, trust_remote_code=True)
    check_model_supported(model, training=False)
    if router_load:
        RouterLoad(model, PrefixTree.from_sequences([]))  # raises if there are none
    if router_aux_loss:
        find_routers(model)
    name = type(model).__name__
    if trains and (noise := random_noise(hf_config)):
        raise ValueError(
            f"{name} draws noise in training: {', '.join(noise)}; it differs between "
            "the visits of a shared token: set it to 0 in the model's config.json, or "
            "use backend fsdp:dN"
        )
    # dropout, named by the configuration or by the modules
    found = dropout(hf_config) + sorted(
        f"{path} (p={module.p})"
        for path, module in text_modules(model).items()
        if isinstance(module, nn.Dropout) and module.p
    )
    if found and not disable_dropout:
        # a recomputed block would also draw another mask
        raise ValueError(
            f"{name} has dropout: {', '.join(found)}; a tree token is computed once "
            "for all sequences through it, so they would share one mask: set "
            "disable_dropout=true, or use backend fsdp:dN"
        )
    if found:
        return [f"dropout of the model ({', '.join(found)}) is switched off"]
    return []


def _config_reasons(config: Any, has_states: bool) -> list[str]:
    reasons = []
    if getattr(config.get_text_config(), "num_hidden_layers", None) is None:
        reasons.append("its config has no num_hidden_layers")
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder")
    if is_multimodal(config) and not has_text_part(config):
        reasons.append("multimodal inputs cannot be split at a prefix")
    config = config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or []
    known = _SPLITTABLE_LAYERS | (_STATEFUL_LAYERS if has_states else set())
    odd = sorted(set(layer_types) - known)
    if odd:
        reasons.append(f"layer types {odd} cannot be split at a prefix")
    if getattr(config, "alibi", False):
        reasons.append("alibi biases")
    for rope_type in _rope_types(config):
        if rope_type in _REFUSED_ROPE:
            reasons.append(
                f"rope_type={rope_type!r} depends on the length of the whole call"
            )
    return reasons


def _rope_types(config: Any) -> set[str]:
    """Return the RoPE types in use; newer configs nest parameters per layer type."""
    found = set()
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None)
        if not isinstance(parameters, dict):
            continue
        nested = [v for v in parameters.values() if isinstance(v, dict)]
        for entry in [parameters, *nested]:
            rope_type = entry.get("rope_type", entry.get("type"))
            if rope_type:
                found.add(str(rope_type))
    return found


def _training_reasons(model: nn.Module) -> list[str]:
    reasons = []
    if getattr(model, "is_gradient_checkpointing", False):
        reasons.append(
            "gradient checkpointing is on: it would run attention again on a path that "
            "has changed; switch it off, retain_tokens bounds memory instead"
        )
    config = getattr(model, "config", None)
    if config is None or not model.training:
        return reasons
    for what, found in (("noise", random_noise(config)), ("dropout", dropout(config))):
        if found:
            reasons.append(
                f"{', '.join(found)}: {what} differs between the visits of a shared "
                "token; set it to 0"
            )
    return reasons


def random_noise(config: Any) -> list[str]:
    """Return the noise in training, other than dropout, that a config names."""
    return [
        f"{key}={value}"
        for key, value in _rates(config)
        if "jitter" in key or key.endswith(("_noise", "layerdrop"))
    ]


def dropout(config: Any) -> list[str]:
    """Return the dropout rates that a config names, those of other heads left out."""
    return [
        f"{key}={value}"
        for key, value in _rates(config)
        if ("dropout" in key or key in ("attn_pdrop", "embd_pdrop", "resid_pdrop"))
        and not key.startswith(("classifier", "summary"))
    ]


def _rates(config: Any) -> list[tuple[str, float]]:
    fields = config.get_text_config().to_dict().items()
    return [(k, value) for k, value in fields if isinstance(value, float) and value > 0]


def check_no_autocast(model: nn.Module) -> None:
    """Refuse autocast: its casts would differ between a block and its path.

    Raises:
        UnsupportedModelError: autocast is on for the model's device.
    """
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        raise UnsupportedModelError(
            f"torch.autocast({device!r}) is on; expected it off around prefix trees: "
            "load the model in the dtype to compute in (or use FSDP's mixed precision)"
        )


def model_inputs(model: Any, token_S: Tensor, depth_S: Tensor) -> dict[str, Any]:
    """Return a decoder's arguments for tokens at the given depths, without a cache.

    Positions go in by every channel that ``forward`` has: some models scale queries by
    ``cache_position``.
    """
    inputs = {
        "input_ids": token_S[None],
        "position_ids": depth_S[None],
        "use_cache": False,
        **text_inputs(model, token_S[None]),
    }
    if hasattr(model, "get_base_model"):  # an adapter hands arguments through
        model = model.get_base_model()
    if _takes_cache_position(getattr(model.forward, "__func__", model.forward)):
        inputs["cache_position"] = depth_S
    return inputs


@functools.lru_cache(maxsize=64)
def _takes_cache_position(forward: Any) -> bool:
    return "cache_position" in inspect.signature(forward).parameters


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, without what FSDP puts before it."""
    return type(module).__name__.removeprefix("FSDP")


def layer_name(module: nn.Module) -> str:
    return f"{class_name(module)} (layer {getattr(module, 'layer_idx', '?')})"


def check_attention_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    num_tokens: int,
    attention_mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    """Refuse what a layer asks of its attention and a block does not do.

    Raises:
        UnsupportedModelError: names the layer, what it asked for and the remedy.
    """
    known = _HARMLESS | _SERVED
    asked = {k: v for k, v in kwargs.items() if v is not None and k not in known}
    problem = None
    if asked.pop("is_causal", True) is False or (
        getattr(module, "is_causal", True) is False
    ):
        problem = "it is not causal"
    elif query.shape[0] != 1:
        problem = f"it was called with a batch of {query.shape[0]}, expected 1"
    elif query.shape[2] != num_tokens or key.shape[2] != num_tokens:
        problem = (
            f"it has {query.shape[2]} queries and {key.shape[2]} keys for {num_tokens} "
            "tokens (virtual tokens of prompt or prefix tuning, or a cache)"
        )
    elif attention_mask is not None:
        problem = "it builds an attention mask of its own"
    elif dropout:
        problem = f"dropout={dropout}; expected 0"
    elif asked:
        named = ", ".join(f"{k}={_brief(v)}" for k, v in sorted(asked.items()))
        problem = f"its attention asks for {named}"
    if problem:
        raise UnsupportedModelError(
            f"{layer_name(module)} cannot run on a prefix tree: {problem}; {REMEDY}"
        )


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    return repr(value)[:40]
