"""Kinds of layers that carry a state, and which layers of a model are of one.

A kind of layer is one module: the classes it knows, and a function that describes one
of them (docs/extending.md). `stateful_layers` finds them in a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from areal_dta.executor.states import gated_deltanet, mamba2, short_convolution
from areal_dta.executor.states.library_scan import installed_delta_rule
from areal_dta.executor.states.protocol import StatefulLayer

KINDS: dict[str, Callable[[Any], StatefulLayer]] = {
    **dict.fromkeys(short_convolution.CLASSES, short_convolution.short_convolution),
    **dict.fromkeys(gated_deltanet.CLASSES, gated_deltanet.gated_deltanet),
    **dict.fromkeys(mamba2.CLASSES, mamba2.mamba2),
}
"""Class name -> its description."""

_MAMBA_1 = (
    "Mamba-1 decays each element of its state by itself, for which there is no scan"
)
UNKNOWN: dict[str, str] = {
    "FalconMambaMixer": _MAMBA_1,
    "JambaMambaMixer": _MAMBA_1,
    "MambaMixer": _MAMBA_1,
    "ZambaMambaMixer": _MAMBA_1,
    "MiniMaxLightningAttention": "there is no scan for lightning attention",
    "RecurrentGemmaRecurrentBlock": "there is no scan for its recurrence",
    "Zamba2MambaMixer": "its layers share attention modules, which do not say for "
    "which layer they are called",
}
"""Class name -> why layers of this class are refused."""

_TOKENWISE = frozenset({"mlp", "moe"})
"""Types of layers of hybrid models that mix no tokens."""


def stateful_layers(model: nn.Module) -> list[StatefulLayer]:
    """Return the layers of a model that carry a state, as KINDS describe them."""
    found = []
    for module in model.modules():
        describe = KINDS.get(_class_name(module))
        if describe is not None:
            found.append(describe(module))
    return found


def scan_line(model: nn.Module) -> str | None:
    """Return one line on what scans the states of a model; None if nothing does."""
    layers = [layer for layer in stateful_layers(model) if layer.has_scan]
    if not layers:
        return None
    names = sorted({_class_name(layer.module) for layer in layers})
    line = f"{len(layers)} layers scan their states ({', '.join(names)}): "
    if layers[0].scans_runs:
        return line + installed_delta_rule()[1]
    line += "in chunks, in PyTorch"
    if not gated_deltanet.CLASSES.isdisjoint(names):
        on_gpu = layers[0].module.A_log.is_cuda
        why = installed_delta_rule()[1] if on_gpu else "not on a GPU"
        line += f" ({why})"
    return line


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def why_unknown(model: nn.Module) -> str | None:
    """Return why the first layer with a state that is not in KINDS is refused."""
    for module in model.modules():
        name = _class_name(module)
        if name in UNKNOWN:
            return f"{name}: {UNKNOWN[name]}"
    return None


def layers_without_attention(model: Any) -> set[int]:
    """Return the layers of a hybrid model that need not call attention."""
    found = {layer.layer_idx for layer in stateful_layers(model)}
    types = getattr(model.config.get_text_config(), "layers_block_type", None) or []
    if found:
        found |= {i for i, kind in enumerate(types) if kind in _TOKENWISE}
    return found
