"""Build a tiny random model of any causal decoder type, and judge the executor on it.

Sizes follow from rules over the attributes of a type's configuration, so that a type
that Transformers adds tomorrow is built without a line here. Each type is held to one
of three verdicts:

  * ``exact``: logprobs, entropies and all gradients equal those of one sequence at a
    time under the model's own eager attention;
  * ``refused``: the executor raised ``UnsupportedModelError``;
  * ``not built``: Transformers cannot build the type from its configuration, or cannot
    run it alone on token ids.

Anything else is a fault: ``wrong`` (silently different) or ``crashed``.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from areal_dta.executor import (
    ExecutorConfig,
    TreeExecutor,
    UnsupportedModelError,
    oracle,
)
from areal_dta.tree import PrefixTree
from tests.models import gradients, relative_error

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB_SIZE = 64
NUM_LAYERS = 4
WINDOW = 6
TOLERANCE = 1e-5
BLOCK_TOKENS = (5, 64)

_SIZES: tuple[tuple[int, str], ...] = (
    # width of the stream, and what must equal it or a multiple of it
    (32, "hidden_size n_embd d_model emb_dim embedding_size input_embedding_size "
    "output_embedding_size word_embed_proj_dim embedding_dim "
    "lru_width hidden_size_global projector_input_dim projector_output_dim "
    "pronunciation_embed_dim shape_embed_dim dim_model out_hidden_size "
    "output_channels input_size hidden_size_per_layer_input"),
    (48, "intermediate_size ffn_dim d_inner dff dim_ff ffn_hidden_size n_inner "
    "decoder_ffn_dim encoder_ffn_dim feed_forward_size intermediate_size_mlp mlp_dim"),
    (24, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size shared_intermediate_size "
    "vector_quantization_hidden_dimension"),
    (VOCAB_SIZE, "vocab_size decoder_vocab_size vocab_size_per_layer_input "
    "pronunciation_vocab_size shape_vocab_size audio_vocab_size codebook_size "
    "encoder_hash_byte_group_vocab mamba_d_ssm attention_hidden_size"),
    (128, "max_position_embeddings n_positions n_ctx max_seq_len context_length "
    "max_target_positions max_source_positions position_bias_max_distance "
    "original_max_position_embeddings"),
    (8, "head_dim kv_channels dim_head d_head attention_head_size qk_nope_head_dim "
    "v_head_dim linear_key_head_dim linear_value_head_dim index_head_dim state_size "
    "mamba_d_state ssm_state_size mamba_headdim mamba_d_head mamba_head_dim "
    "laurel_rank time_step_rank mamba_dt_rank adapter_rank chunk_size mamba_chunk_size "
    "block_size global_head_dim mamba_n_heads mamba_num_heads"),
    (16, "q_lora_rank kv_lora_rank attention_head_dim query_pre_attn_scalar image_size "
    "position_bias_num_buckets"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads index_n_heads "
    "decoder_attention_heads encoder_attention_heads num_decoder_attention_heads "
    "num_encoder_attention_heads qk_rope_head_dim rotary_dim num_experts "
    "num_local_experts n_routed_experts moe_num_experts linear_num_value_heads "
    "patch_size mm_tokens_per_image zero_expert_num prompt_types segment_types "
    "num_query_groups"),
    (NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers "
    "encoder_layers num_decoder_layers num_encoder_layers depth num_blocks "
    "num_global_layers conf_num_hidden_layers"),
    (2, "num_key_value_heads num_kv_heads kv_n_heads linear_num_key_heads "
    "num_experts_per_tok moe_k moe_topk moe_top_k sliding_window_pattern "
    "first_k_dense_replace num_kv_shared_layers max_window_layers num_dense_layers "
    "no_rope_layer_interval global_attn_every_n_layers num_random_blocks"),
    (1, "n_group topk_group n_shared_experts num_shared_experts mamba_n_groups "
    "n_groups mamba_ngroups moe_num_shared_experts"),
    (WINDOW, "sliding_window window_size attention_window_size keep_window_size "
    "attention_chunk_size index_topk local_attention"),
)  # fmt: skip
SIZE_OF: dict[str, int] = {name: n for n, names in _SIZES for name in names.split()}

# What the rules cannot know, each with its reason.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    # the attention's own configuration lacks what Transformers 5.3 reads from it, and
    # the router's width is that of the experts
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    # the decoder's own configuration is chosen by name, and is of 24 layers by default
    "got_ocr2": {
        "text_config": {
            "model_type": "qwen2",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        }
    },
    # a pattern and how often it is repeated: must give the number of layers
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]]},
    # the default is None, which the model cannot read
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    # axial positions take sequences of one length only
    "reformer": {"axial_pos_embds": False},
    # Transformers 5.3 is wrong beyond one chunk on CPUs (executor/states/mamba2.py)
    "nemotron_h": {"chunk_size": 64},
    # adapters per language, none of which is the default
    "xmod": {"default_language": "en_XX"},
}


@dataclass(frozen=True)
class Case:
    """A model type, maybe with options that change what its attention does."""

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    """What the options are for; empty for the type as its configuration has it."""
    attention: str = "eager"
    """Attention implementation that the model is built with."""

    @property
    def name(self) -> str:
        return f"{self.model_type} ({self.note})" if self.note else self.model_type


_FULL = ["full_attention"] * NUM_LAYERS
_WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_YARN["original_max_position_embeddings"] = 16

# Options that change what attention, positions or layers do.
VARIANTS: tuple[Case, ...] = (
    Case("bert", {"is_decoder": False}, "is_decoder=False"),
    Case("falcon", {"alibi": True}, "alibi"),
    Case("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    Case("gemma3n_text", {"num_kv_shared_layers": 0}, "no shared keys"),
    Case("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse layer scale"),
    Case("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    Case("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
    Case("gpt_bigcode", {"multi_query": False}, "multi_query=False"),
    Case("gpt_neox", {"use_parallel_residual": False}, "serial residual"),
    Case("granitemoehybrid", {"layer_types": ["attention"] * NUM_LAYERS}, "no Mamba"),
    Case("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "convolutions"),
    Case("llama", {"tie_word_embeddings": True}, "tied embeddings"),
    Case("llama", {"attention_dropout": 0.1}, "dropout"),
    Case("llama", {"rope_parameters": _YARN}, "yarn"),
    Case(
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "dynamic rope",
    ),
    Case(
        "llama4_text",
        {"layer_types": _FULL, "floor_scale": 4, "attn_scale": 0.5},
        "no chunks, temperature tuning",
    ),
    Case(
        "ministral3",
        {
            "rope_parameters": {
                **_YARN,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 8,
            }
        },
        "llama 4 scaling",
    ),
    Case("mistral", {"sliding_window": None}, "no window"),
    Case("mixtral", {"router_jitter_noise": 0.1}, "router jitter"),
    Case("mixtral", {"sliding_window": WINDOW}, "window"),
    Case("olmo", {"clip_qkv": 0.5}, "clip_qkv"),
    Case("opt", {"do_layer_norm_before": False}, "norm after"),
    Case("phi", {"qk_layernorm": True}, "qk_layernorm"),
    Case("phi3", {"sliding_window": WINDOW}, "window"),
    Case(
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 16,
            },
        },
        "longrope",
    ),
    Case("qwen2", _WINDOWED, "window"),
    Case("qwen2_moe", _WINDOWED, "window"),
    Case("qwen3", _WINDOWED, "window"),
    Case("qwen3_moe", _WINDOWED, "window"),
    Case("smollm3", _WINDOWED, "window"),
    Case("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}, "parallel"),
    Case("starcoder2", {"sliding_window": WINDOW}, "window"),
)
CASES = tuple(sorted((*map(Case, MODEL_TYPES), *VARIANTS), key=lambda case: case.name))


@dataclass(frozen=True)
class Verdict:
    case: Case
    kind: str
    """``exact``, ``refused``, ``not built``, ``wrong`` or ``crashed``."""
    reason: str = ""
    architecture: str = ""
    trace: str = ""
    """Traceback, if the case was not built or crashed."""


def tiny_options(config_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments that make a small configuration of a class.

    Args:
        options: win over the rules.
    """
    default = config_class()
    names = set(inspect.signature(config_class.__init__).parameters) | set(
        vars(default)
    )
    sizes: dict[str, Any] = {name: SIZE_OF[name] for name in names if name in SIZE_OF}
    # no dropout, no layer left out: both draw at random in training
    for name, value in vars(default).items():
        is_rate = isinstance(value, float) and value > 0
        if is_rate and any(w in name for w in ("drop", "jitter")):
            sizes[name] = 0.0
        if name.endswith(("token_id", "token_index")) and isinstance(value, int):
            sizes[name] = min(value, VOCAB_SIZE - 1)
    for i, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if name in vars(default):
            sizes[name] = i
    # widths that others imply
    if "qk_rope_head_dim" in names:
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    if "kv_lora_rank" in names:  # latent attention: a key per query head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "expand" in names and "num_heads" in names:
        sizes["head_dim"] = default.expand * sizes["hidden_size"] // sizes["num_heads"]
    # one layer of each kind in turn; other lists of one entry per layer are cut
    num_layers = getattr(default, "num_hidden_layers", None)
    for name, value in vars(default).items():
        if isinstance(value, list | tuple) and len(value) == num_layers:
            kinds = value
            if all(isinstance(x, str) for x in value):
                kinds = sorted(set(value))[::-1]
            sizes[name] = [kinds[i % len(kinds)] for i in range(NUM_LAYERS)]
    for name, sub_class in config_class.sub_configs.items():
        if isinstance(sub_class, type) and hasattr(sub_class, "sub_configs"):
            if getattr(default, name, None) is not None and name in names:
                sizes[name] = tiny_options(sub_class, {})
    if "is_decoder" in vars(default) and not default.is_encoder_decoder:
        sizes["is_decoder"] = True
    return _merged(sizes, options)


def _merged(sizes: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(sizes)
    for name, value in options.items():
        nested = isinstance(value, Mapping) and isinstance(sizes.get(name), Mapping)
        merged[name] = _merged(sizes[name], value) if nested else value
    return merged


def build(case: Case) -> PreTrainedModel:
    """Build the model of a case: fp32, train mode, no parameter at its default."""
    # of a multimodal type, the configuration of what is a causal language model
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[case.model_type]]
    config_class = model_class.config_class
    options = _merged(EXCEPTIONS.get(case.model_type, {}), case.options)
    config = config_class(**tiny_options(config_class, options))
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=case.attention)
    with torch.no_grad():  # init leaves norms at one, biases and sinks at zero
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.float().train()


def sweep_batch() -> list[list[int]]:
    """Sequences of up to 29 tokens: forks, a strict prefix, a duplicate.

    Some fork within a window's length of their root, some past it; every id occurs.
    """
    tokens = np.random.default_rng(3).permutation(VOCAB_SIZE).tolist()
    trunk, rest = tokens[:20], tokens[20:]
    middle = trunk[:12]
    fork = [*middle, *rest[14:22]]
    return [
        trunk + rest[:9],
        trunk + rest[9:14],
        fork,
        middle,
        trunk[:3] + rest[34:],
        fork,
    ]


def _weighted(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    weight = torch.randn(len(logprobs), generator=generator)
    return (logprobs * weight).sum() + 0.3 * (entropy * weight.flip(0)).sum()


def judge(case: Case, build: Callable[[Case], PreTrainedModel] = build) -> Verdict:
    """Hold one model to its verdict."""
    model = None
    batch = sweep_batch()
    try:
        model = build(case)
        want = oracle.sequence_outputs(model, batch)
        oracle.forward_backward(model, batch, _weighted)
        want_grad = gradients(model)
    except Exception as error:  # whatever Transformers raises is the reason
        return _without_truth(case, model, error)
    architecture = type(model).__name__
    tree = PrefixTree.from_sequences(batch)
    try:
        for block_tokens in BLOCK_TOKENS:
            # in short blocks with MLPs and norms run again, in long ones without
            recompute = "mlp" if block_tokens == min(BLOCK_TOKENS) else "none"
            config = ExecutorConfig(block_tokens, recompute=recompute)
            executor = TreeExecutor(model, config)
            outputs = executor.forward(tree)
            errors = {
                name: relative_error(_flat(outputs, name), _flat(want, name))
                for name in ("logprobs", "entropy")
            }
            executor.forward_backward(tree, _weighted)
            errors["gradients"] = relative_error(gradients(model), want_grad)
            if not max(errors.values()) <= TOLERANCE:
                reason = ", ".join(f"{k} {v:.1e}" for k, v in errors.items())
                return Verdict(
                    case, "wrong", f"block {block_tokens}: {reason}", architecture
                )
    except UnsupportedModelError as error:
        return Verdict(case, "refused", str(error), architecture)
    except Exception as error:
        return Verdict(
            case, "crashed", _one_line(error), architecture, traceback.format_exc()
        )
    return Verdict(case, "exact", architecture=architecture)


def _without_truth(
    case: Case, model: PreTrainedModel | None, error: Exception
) -> Verdict:
    """Return the verdict on a type that cannot be run on its own."""
    if model is not None:
        try:
            TreeExecutor(model)
        except UnsupportedModelError as refusal:
            return Verdict(case, "refused", str(refusal), type(model).__name__)
    name = type(model).__name__ if model is not None else ""
    return Verdict(case, "not built", _one_line(error), name, traceback.format_exc())


def _flat(outputs: Sequence[oracle.SequenceOutput], name: str) -> Tensor:
    return torch.cat([getattr(output, name) for output in outputs])


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
