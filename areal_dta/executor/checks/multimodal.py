"""Text part of multimodal checkpoints: what is trained and checked of them.

A checkpoint such as ``Gemma3ForConditionalGeneration`` is loaded as it is, so that it
is exported under the same names. On token ids alone it is its decoder and its head:
towers for images or sound are not called, and their parameters stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)


def is_multimodal(config: Any) -> bool:
    """Return whether a configuration has parts for other inputs than text."""
    names = ("vision_config", "audio_config")
    return any(getattr(config, name, None) is not None for name in names)


def has_text_part(config: Any) -> bool:
    """Return whether Transformers runs a multimodal model on token ids alone."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def auto_class(config: Any) -> Any:
    """Return the class that loads all of a checkpoint for the training of its text."""
    if is_multimodal(config) and has_text_part(config):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def serving_class(config: Any) -> Any:
    """Return the class that generates text: of the text part alone, if there is one."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return auto_class(config)


def text_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that run on text, by path: all, unless it is multimodal."""
    modules = dict(model.named_modules())
    if not is_multimodal(getattr(model, "config", None)):
        return modules
    base: Any = model
    parts = [base.get_decoder(), base.get_output_embeddings()]
    inside = {id(m) for part in parts if part is not None for m in part.modules()}
    return {path: module for path, module in modules.items() if id(module) in inside}


def freeze_other_parts(model: nn.Module) -> int:
    """Freeze what does not run on text; return the number of parameters.

    They get no gradient from text, and an optimizer would decay them all the same.
    """
    trained = {id(p) for m in text_modules(model).values() for p in m.parameters()}
    others = [p for p in model.parameters() if id(p) not in trained]
    for parameter in others:
        parameter.requires_grad_(False)
    return sum(p.numel() for p in others)


def text_inputs(model: Any, token_BS: Tensor) -> dict[str, Tensor]:
    """Return the arguments by which a multimodal model knows that all tokens are text.

    Gemma 3 insists on them in training.
    """
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) in ("gemma3", "git", "paligemma"):
        return {"token_type_ids": torch.zeros_like(token_BS)}
    return {}
