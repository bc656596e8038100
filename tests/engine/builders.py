"""A tiny model on disk, GRPO batches that share prefixes, and engines on them."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from areal.api import FinetuneSpec, ParallelStrategy
from areal.api.cli_args import (
    MicroBatchSpec,
    OptimizerConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TrainEngineConfig,
)
from areal.engine.fsdp_engine import FSDPPPOActor
from tokenizers import Tokenizer, models
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 61
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # logits that differ, hence entropies below maximum
}


def save_tiny_model(path: Path, **overrides: Any) -> Path:
    """A random Qwen3 with grouped-query heads and a tokenizer beside it."""
    config = Qwen3Config(**_SIZES | {"tie_word_embeddings": False} | overrides)
    return _save(Qwen3ForCausalLM, config, path)


def save_tiny_critic(path: Path) -> Path:
    """One number a token; Transformers gives its head a dropout of 0.1."""
    config = Qwen3Config(**_SIZES | {"num_labels": 1})
    return _save(Qwen3ForTokenClassification, config, path)


def save_tiny_moe(path: Path) -> Path:
    """A random Qwen3-MoE: one token does not reach all of its experts."""
    config = Qwen3MoeConfig(
        **_SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
    )
    return _save(Qwen3MoeForCausalLM, config, path)


def save_tiny_hybrid(path: Path) -> Path:
    """A random Qwen3.5: a layer with a state, and one that attends."""
    config = Qwen3_5TextConfig(
        **_SIZES,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    return _save(Qwen3_5ForCausalLM, config, path)


def save_tiny_llama(path: Path, **overrides: Any) -> Path:
    return _save(LlamaForCausalLM, LlamaConfig(**_SIZES | overrides), path)


def _save(model_class: Any, config: Any, path: Path) -> Path:
    torch.manual_seed(0)
    model_class(config).save_pretrained(path)
    return save_tokenizer(path)


def save_tokenizer(path: Path) -> Path:
    """Save a tokenizer of VOCAB_SIZE words."""
    vocab = {f"t{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", eos_token="t1", unk_token="t0"
    ).save_pretrained(path)
    return path


def engine_config(config_class: Any, model: Path, **overrides: Any) -> Any:
    """SGD, so that updates can be compared, in fp32 on a CPU.

    ``dta``: options of the tree engine, on configurations that have no such field.
    """
    values: dict[str, Any] = {
        "experiment_name": "test",
        "trial_name": "engine",
        "path": str(model),
        "backend": "fsdp:d1",
        "dtype": "float32",
        "attn_impl": "sdpa",
        "optimizer": OptimizerConfig(
            type="sgd",
            lr=0.1,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            warmup_steps_proportion=0.0,
            gradient_clipping=1e6,
        ),
        "mb_spec": MicroBatchSpec(),
        **overrides,
    }
    dta = values.pop("dta", None)
    config = config_class(**values)
    if dta is not None:
        config.dta = dta
    return config


def actor_config(model: Path, **overrides: Any) -> PPOActorConfig:
    """Decoupled GRPO."""
    values = {"ppo_n_minibatches": 1, "use_decoupled_loss": True, "kl_ctl": 0.0}
    config: PPOActorConfig = engine_config(PPOActorConfig, model, **values | overrides)
    return config


def value_config(config_class: Any, model: Path, **overrides: Any) -> Any:
    """Return the configuration of a critic or a reward model."""
    values: dict[str, Any] = {"is_critic": True, "disable_dropout": True}
    if config_class is PPOCriticConfig:
        values["ppo_n_minibatches"] = 1
    return engine_config(config_class, model, **values | overrides)


def one_sequence_each(num_rows: int) -> MicroBatchSpec:
    """Micro-batches in which nothing can leak from one sequence to another."""
    return MicroBatchSpec(n_mbs=num_rows)


class MasklessActor(FSDPPPOActor):
    """AReaL's actor, made to load multimodal checkpoints that it does not list, and to
    pass no mask: its dictionary of no masks is one that few models can read."""

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self.is_vision_model = hasattr(self.model_config, "vision_config")

    def _prepare_mb_list(self, input_: dict[str, Any]) -> Any:
        mb_list = super()._prepare_mb_list(input_)
        for mb in mb_list.padded_mbs:
            mb["attention_mask"] = None
        return mb_list


def build_engine(engine_class: type, config: TrainEngineConfig) -> Any:
    engine = engine_class(copy.deepcopy(config))
    num_ranks = int(os.environ["WORLD_SIZE"])
    engine.create_process_group(ParallelStrategy(data_parallel_size=num_ranks))
    engine.initialize(
        None, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1)
    )
    engine.train()
    return engine


def grpo_batch(num_prompts: int = 2, num_samples: int = 3, seed: int = 0) -> dict:
    """Padded rows [prompt x sample] as they come out of ``compute_advantages``.

    Samples of a prompt share it and now and then some of the answer; the last row
    repeats the one before it, and its neighbour is a strict prefix of it.
    """
    rng = np.random.default_rng(seed)
    rows: list[tuple[list[int], int]] = []  # tokens, prompt length
    for _ in range(num_prompts):
        prompt = rng.integers(2, VOCAB_SIZE, int(rng.integers(4, 9))).tolist()
        stem = rng.integers(2, VOCAB_SIZE, 5).tolist()
        for _ in range(num_samples):
            keep = int(rng.integers(0, 6))
            tail = rng.integers(2, VOCAB_SIZE, int(rng.integers(1, 7))).tolist()
            rows.append((prompt + stem[:keep] + tail, len(prompt)))
    if len(rows) > 2:
        rows[-2] = rows[-1]
        rows[-3] = (rows[-1][0][:-1], rows[-1][1])
    num_rows, width = len(rows), max(len(tokens) for tokens, _ in rows)
    batch = {
        "input_ids": torch.zeros((num_rows, width), dtype=torch.long),
        "attention_mask": torch.zeros((num_rows, width), dtype=torch.bool),
        "loss_mask": torch.zeros((num_rows, width)),
        "versions": torch.full((num_rows, width), -1),
    }
    for i, (tokens, prompt_length) in enumerate(rows):
        batch["input_ids"][i, : len(tokens)] = torch.tensor(tokens)
        batch["attention_mask"][i, : len(tokens)] = True
        # rolled by -1, as compute_advantages leaves it
        batch["loss_mask"][i, prompt_length - 1 : len(tokens) - 1] = 1
        batch["versions"][i, prompt_length : len(tokens)] = i % 2
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, width)
    for key, mean, spread in (
        ("logprobs", -4.0, 0.3),
        ("prox_logp", -4.0, 0.3),
        ("advantages", 0.0, 1.0),
    ):
        noise = torch.randn(shape, generator=generator)
        batch[key] = (mean + spread * noise) * batch["loss_mask"]
    return batch


def rows_of(batch: dict, rows: list[int]) -> dict:
    return {key: value[rows].clone() for key, value in batch.items()}


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Return each parameter's gradient, gathered from all ranks. Collective."""
    return {
        name: full(p.grad).detach().clone()
        for name, p in engine.model.named_parameters()
        if p.grad is not None
    }


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    return {n: full(p).detach().clone() for n, p in engine.model.named_parameters()}


def relative_error(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> float:
    """Largest difference of a parameter over the norm of its expected value."""
    assert actual.keys() == expected.keys() and expected
    return max(
        float((actual[n] - e).norm() / e.norm().clamp_min(1e-12))
        for n, e in expected.items()
    )
