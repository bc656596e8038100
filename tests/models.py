"""Small random models of each architecture, and norms that keep fp64."""

import types

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 40
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The architectures that the executor supports, with what makes each special.
ARCHITECTURES = {
    "llama": {},
    "llama-gqa4": {"num_key_value_heads": 1},
    "qwen2": {},
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mistral": {"sliding_window": None},
}


def tiny_model(
    name: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attn_implementation: str = "sdpa",
    **overrides,
) -> PreTrainedModel:
    """Build a random model; ``name`` is a model type, maybe with a suffix as above."""
    sizes = SMALL | ARCHITECTURES.get(name, {}) | overrides
    config = CONFIG_MAPPING[name.split("-")[0]](**sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attn_implementation
    )
    with torch.no_grad():  # init leaves norms at one and biases at zero
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    model = model.to(dtype).train()
    if dtype == torch.float64:
        keep_norms_in_fp64(model)
    return model


_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Multimodal types: options of the text part, and of the whole.
MULTIMODAL = {
    "gemma3": (
        {"sliding_window": 6, "query_pre_attn_scalar": 8},
        {
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 37,
            "boi_token_index": 38,
            "eoi_token_index": 39,
        },
    ),
    "mistral3": (
        {"model_type": "mistral"},
        {
            "vision_config": {"model_type": "pixtral", "head_dim": 8, **_VISION},
            "image_token_index": 37,
        },
    ),
}


def tiny_multimodal(name: str, **text_options) -> PreTrainedModel:
    """Build a random multimodal model with a tiny tower for images."""
    text, others = MULTIMODAL[name]
    text_config = SMALL | text | text_options
    config = CONFIG_MAPPING[name](text_config=text_config, **others)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model.train()


def keep_norms_in_fp64(model: nn.Module) -> None:
    """Transformers casts RMSNorm inputs to fp32, which alone costs 1e-7."""

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.eps_fp64)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.eps_fp64 = module.variance_epsilon
            module.forward = types.MethodType(forward, module)


def gradients(model: nn.Module) -> torch.Tensor:
    """Return all gradients as one fp64 vector, and set them to None."""
    flat = [
        (torch.zeros_like(p) if p.grad is None else p.grad).double().flatten()
        for p in model.parameters()
    ]
    model.zero_grad(set_to_none=True)
    return torch.cat(flat)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the expected."""
    norm = float(expected.norm())
    return float((got - expected).norm()) / (norm if norm > 0 else 1.0)
