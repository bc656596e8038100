"""Check that models can be loaded, trained and served, before their weights are read.

The tree engine's own refusals are in `areal_dta.executor.model_refusals`, those of the
embedded server in `areal_dta.rollout_server.weights`.
"""

from __future__ import annotations

import os
from typing import Any

from areal.utils.data import DEFAULT_MAX_TOKENS_PER_MB

from areal_dta.config.composed import ConfigError, one_line, shorten
from areal_dta.config.resolved import ResolvedRun, Section
from areal_dta.config.schema import DTAGRPOConfig
from areal_dta.engine import VALUE_KINDS
from areal_dta.engine.setting_checks import router_aux_loss
from areal_dta.executor.checks.multimodal import serving_class
from areal_dta.executor.checks.state_layers import has_layers_with_state
from areal_dta.executor.model_refusals import check_unloaded_model


def check_token_limits(run: ResolvedRun) -> None:
    """Check that every model takes the sequences that the actor takes."""
    limit = run.actor.config.mb_spec.max_tokens_per_mb or DEFAULT_MAX_TOKENS_PER_MB
    for model in run.models[1:]:
        own = model.config.mb_spec.max_tokens_per_mb or DEFAULT_MAX_TOKENS_PER_MB
        if own < limit:
            raise ConfigError(
                f"{model.name}.mb_spec.max_tokens_per_mb={own}, but {model.name} gets "
                "the actor's sequences, which may have "
                f"actor.mb_spec.max_tokens_per_mb={limit} tokens; set it to {limit}"
            )


def check_model(model: Section, trust_remote_code: bool) -> list[str]:
    """Check that a model can be loaded and trained, from a directory or the hub.

    Returns:
        A warning if its backend would train it wrongly.
    """
    from transformers import AutoConfig

    path, key = model.config.path, f"{model.name}.path"
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(f"{key}={path} holds no config.json: not a model")
    if path.startswith(("/", "./", "../", "~")) and not os.path.isdir(path):
        raise ConfigError(f"{key}={path}: no such directory")
    try:
        if not trust_remote_code:
            check_no_code(path, key)
        found = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as e:
        if isinstance(e, ConfigError):
            raise
        reason = shorten(one_line(e), 200)
        raise ConfigError(f"{key}={path} cannot be loaded: {reason}") from e
    counts_experts = model.backend.engine == "dta" and model.config.dta.router_load
    if counts_experts and not any(
        "expert" in key for key in found.get_text_config().to_dict()
    ):
        raise ConfigError(
            f"{model.name}.dta.router_load=true, but {path} ({found.model_type}) "
            "has no experts; set it false"
        )
    router_loss, _ = router_aux_loss(model.config, found)
    if model.backend.engine != "dta":
        if router_loss:
            raise ConfigError(
                f"{model.name}.dta.router_aux_loss={router_loss:g} is trained by the "
                f"tree engine only; use {model.name}.backend=dta:dN, or 0"
            )
        return _packing_note(model, found)
    num_layers = getattr(found.get_text_config(), "num_hidden_layers", None)
    if model.config.dta.reshard == "block" and num_layers == 1:
        raise ConfigError(
            f"{model.name}.dta.reshard=block needs two layers or more, and {path} has "
            f"one; use {model.name}.dta.reshard=step"
        )
    try:
        check_unloaded_model(
            found,
            is_critic=model.kind in VALUE_KINDS,
            trains=model.config.optimizer is not None,
            disable_dropout=model.config.disable_dropout,
            router_load=model.config.dta.router_load,
            router_aux_loss=bool(router_loss),
        )
    except ValueError as e:
        raise ConfigError(f"{key}={path}: {one_line(e)}") from e
    return []


def _packing_note(model: Section, hf_config: Any) -> list[str]:
    """Return a warning where packed sequences would reach one another by a state."""
    if model.backend.engine == "fsdp":  # the dense twin splits such layers
        return []
    try:
        if not has_layers_with_state(hf_config):
            return []
    except (ValueError, ImportError):  # that engine will say what it does not know
        return []
    return [
        f"{model.name}.backend={model.config.backend}: {hf_config.model_type} has "
        "layers that carry a state from token to token, and AReaL packs sequences "
        "without telling them where one ends: all but the first of a micro-batch are "
        f"trained on wrong values. Use {model.name}.backend=dta:dN or fsdp:dN, or "
        f"{model.name}.mb_spec.n_mbs=<sequences per rank>"
    ]


def check_no_code(path: str, key: str, is_model: bool = True) -> None:
    """Check that a checkpoint brings no code: AReaL's workers would run it.

    Args:
        is_model: false for a directory that may hold a tokenizer alone.

    Raises:
        ConfigError: it does.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    files = {"tokenizer_config.json": get_tokenizer_config(path)}
    if is_model:
        files["config.json"], _ = PretrainedConfig.get_config_dict(path)
    for name, values in files.items():
        if "auto_map" in values:
            raise ConfigError(
                f"{key}={path} brings code of its own (auto_map in {name}), which "
                "AReaL's workers would run; remove that entry where Transformers has "
                "the class itself, or set trust_remote_code=true if you trust it"
            )


def check_served_model(config: DTAGRPOConfig) -> None:
    """Check that the embedded server can serve the model of the rollouts."""
    import torch
    from transformers import AutoConfig

    from areal_dta.rollout_server.weights import check_supported

    path = config.local.model_path
    if config.trust_remote_code:
        raise ConfigError(
            "trust_remote_code=true, but rollout.backend=local never runs code of a "
            "checkpoint; use rollout.backend=sglang:dN"
        )
    try:
        check_no_code(path, "local.model_path")
        with torch.device("meta"):
            found = AutoConfig.from_pretrained(path)
            model = serving_class(found).from_config(found)
        check_supported(model)
    except ConfigError:
        raise
    except (OSError, ValueError) as e:
        raise ConfigError(f"local.model_path={path}: {one_line(e)}") from e
