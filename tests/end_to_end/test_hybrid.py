"""A model shaped like Qwen3.5, trained by GRPO on the embedded problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.end_to_end.test_algorithms import small

TOKENIZER = (
    Path(__file__).parents[2] / "areal_dta" / "embedded" / "assets" / "tiny-qwen3"
)


def save_hybrid(path: Path) -> Path:
    """Save a random model of four layers, three of them linear, with a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def token_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: list[int], **_: Any
) -> float:
    """Return a reward that differs between the samples of an untrained model."""
    return sum(completion_ids) % 7 / 7


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_steps_of_grpo(tmp_path: Path) -> None:
    records = small(
        tmp_path,
        "gsm8k_grpo.yaml",
        f"actor.path={save_hybrid(tmp_path / 'model')}",
        f"reward_fn={__name__}.token_reward",
        "actor.dta.fuse_prox_logp='false'",  # logprobs of their own, to compare
    )
    for record in records:
        # the server's logprobs are the trainer's, after weight updates too
        assert record["logprob_gap"] < 1e-3
        assert 0 < record["reward"] < 1
