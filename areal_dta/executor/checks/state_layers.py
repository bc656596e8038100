"""Layers that carry a state from token to token, found without knowing their class.

A packed call of such a layer carries one sequence's state into the next. Engines that
pack have to split it (`areal_dta.engine.dense_engines`), or to warn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from areal_dta.executor.checks.multimodal import auto_class, text_modules


def layers_with_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that convolve over tokens or scan them, by path.

    Known are those that hold a one-dimensional convolution, recurrent modules of
    PyTorch, and lightning attention, which has no convolution.
    """
    found: dict[str, nn.Module] = {}
    for path, module in text_modules(model).items():
        carries = isinstance(module, nn.RNNBase) or (
            type(module).__name__.endswith("LightningAttention")
            or any(isinstance(child, nn.Conv1d) for child in module.children())
        )
        if carries and not any(path.startswith(f"{above}.") for above in found):
            found[path] = module
    return found


def has_layers_with_state(hf_config: Any) -> bool:
    """Return whether the model of a configuration has such layers.

    Its modules are made without memory for weights.
    """
    with torch.device("meta"):
        model = auto_class(hf_config).from_config(hf_config)
    return bool(layers_with_state(model))
