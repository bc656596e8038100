"""Models to measure: Qwen3 and Qwen3.5 shapes with random weights; no downloads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim"
).split()
# At the lengths of tau2, `20m` spends about the same share of its FLOPs on the
# vocabulary as Qwen3-0.6B (18 % and 17 % at 6,000 tokens), which is what outputs at
# loss positions only save.
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, sizes, strict=True))
    for name, sizes in {
        "tiny": (512, 64, 128, 2, 4, 2, 16),
        "2m": (8192, 128, 384, 2, 2, 1, 64),
        "20m": (32768, 256, 768, 16, 4, 2, 64),
        "qwen3-0.6b": (151936, 1024, 3072, 28, 16, 8, 128),
        "qwen3-1.7b": (151936, 2048, 6144, 28, 16, 8, 128),
        "qwen3-8b": (151936, 4096, 12288, 36, 32, 8, 128),
    }.items()
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
