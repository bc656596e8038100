"""Models to measure on: Qwen3 shapes with random weights, so nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

_COMMON: dict[str, Any] = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
# `20m` spends as much of its FLOPs on the vocabulary as Qwen3-0.6B does at the lengths
# of tau2 (18 % and 17 % at 6,000 tokens), which is what loss positions only saves on.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "20m": {
        "vocab_size": 32768,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-1.7b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def build_model(name: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A model of shape ``name`` in training mode, made on the device itself.

    Raises:
        ValueError: no shape of that name.
    """
    if name not in SHAPES:
        raise ValueError(f"model {name!r}; expected one of {', '.join(SHAPES)}")
    torch.manual_seed(seed)
    config = Qwen3Config(**_COMMON, **SHAPES[name])
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return model.to(device).train()
