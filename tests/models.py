"""Small random models of each architecture, in fp64 without casts to fp32."""

import functools

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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
_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_CONVOLUTIONS = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}
_EXPERTS = ARCHITECTURES["qwen3_moe"] | {"experts_implementation": "eager"}
_SMALL_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
# Those with layers that carry a state.
HYBRIDS = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_next": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 24},
    "olmo_hybrid": _DELTA,
    "lfm2": _CONVOLUTIONS | {"block_ff_dim": 48},
    "lfm2_moe": _CONVOLUTIONS | _EXPERTS | {"num_dense_layers": 1},
    "mamba2": {
        "attn_implementation": "eager",
        "num_heads": 8,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "expand": 2,
    },
    "bamba": _SMALL_MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": _SMALL_MAMBA
    | {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 24,
    },
    "granitemoehybrid-experts": _SMALL_MAMBA
    | {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 256,  # beyond it Transformers' own path on CPUs is wrong
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "experts_implementation": "eager",
    },
    "falcon_h1": _SMALL_MAMBA | {"mamba_d_ssm": 64},
}


def tiny_model(
    name: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attn_implementation: str = "sdpa",
    **overrides,
) -> PreTrainedModel:
    """Build a random model; ``name`` is a model type, maybe with a suffix as above."""
    sizes = SMALL | (ARCHITECTURES | HYBRIDS).get(name, {}) | overrides
    kernels = {
        "attn_implementation": sizes.pop("attn_implementation", attn_implementation)
    }
    if experts := sizes.pop("experts_implementation", None):
        kernels["experts_implementation"] = experts
    config = CONFIG_MAPPING[name.split("-")[0]](**sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **kernels)
    with torch.no_grad():  # init leaves norms at one and biases at zero
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    model = model.to(dtype).train()
    if dtype == torch.float64:
        keep_fp64(model)
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
    "qwen3_5": (
        _DELTA,
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": SMALL["hidden_size"],
                "num_position_embeddings": 16,
            },
            "vision_start_token_id": 36,
            "image_token_id": 37,
            "video_token_id": 38,
            "vision_end_token_id": 39,
        },
    ),
}


def tiny_multimodal(
    name: str, dtype: torch.dtype = torch.float32, **text_options
) -> PreTrainedModel:
    """Build a random multimodal model with a tiny tower for images."""
    text, others = MULTIMODAL[name]
    text_config = SMALL | text | text_options
    config = CONFIG_MAPPING[name](text_config=text_config, **others)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    model = model.to(dtype).train()
    if dtype == torch.float64:
        keep_fp64(model)
    return model


class _NoCasts(TorchFunctionMode):
    """What casts fp64 or integers to fp32 gives fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype in (torch.float64, torch.int64):
            if func is Tensor.float:
                return first.double()
            if func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def keep_fp64(model: nn.Module) -> None:
    """Take casts to fp32 out of an fp64 model.

    Transformers computes norms, gates, scans and softmax in fp32; a norm alone costs
    1e-7.
    """
    own = model.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        with _NoCasts():
            return own(*args, **kwargs)

    model.forward = forward


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
