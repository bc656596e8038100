"""Models to measure: Qwen3 and Qwen3.5 shapes with random weights; no downloads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

from areal_dta.inspect.models import FIELDS
from areal_dta.inspect.models import SHAPES as SIZES

SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(FIELDS, SIZES[name], strict=True))
    for name in ("tiny", "2m", "20m", "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b")
}
# Three of four layers carry a state, as in Qwen3.5.
SHAPES["qwen3.5-20m"] = SHAPES["20m"] | {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_UNTIED = ("qwen3-8b",)


def build_model(name: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Build a model of shape ``name`` in training mode, directly on the device.

    Raises:
        ValueError: no shape of that name.
    """
    if name not in SHAPES:
        raise ValueError(f"model {name!r}; expected one of {', '.join(SHAPES)}")
    torch.manual_seed(seed)
    config_class: Any = Qwen3_5TextConfig if name.startswith("qwen3.5") else Qwen3Config
    config = config_class(
        **SHAPES[name],
        tie_word_embeddings=name not in _UNTIED,
        max_position_embeddings=40960,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return model.to(device).train()
