"""Models that cannot be split at a prefix are refused by name, never silently."""

import dataclasses
import importlib

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from areal_dta.executor import (
    ExecutorConfig,
    TreeExecutor,
    UnsupportedModelError,
    oracle,
)
from areal_dta.tree import PrefixTree
from tests.models import SMALL, tiny_model

TREE = PrefixTree.from_sequences([list(range(3, 15)), [3, 4, 5, 9, 9, 9, 9, 9]])


def run(model):
    executor = TreeExecutor(model, ExecutorConfig(block_tokens=4))
    executor.forward_backward(TREE, lambda i, logprobs, entropy: logprobs.sum())


def build(model_type: str, **overrides):
    config = CONFIG_MAPPING[model_type](**(SMALL | overrides))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "not causal|attention mask of its own",
        ),
        ("bloom", {}, "layers called the attention interface"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0,
                                 "rope_theta": 1e4}},
            "rope_type='dynamic'",
        ),
        (
            "minimax",
            {"layer_types": ["linear_attention", "full_attention"],
             "num_local_experts": 2, "num_experts_per_tok": 1},
            "linear_attention",
        ),
        ("mamba", {}, "mixes tokens outside attention"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)  # fmt: skip
def test_refused(model_type, overrides, reason):
    model = build(model_type, **overrides).train()
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        run(model)
    assert "fsdp" in str(error.value) and "\n" not in str(error.value)


def test_gradient_checkpointing_is_refused_in_training_only():
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(UnsupportedModelError, match="gradient checkpointing is on"):
        run(model)
    assert len(TreeExecutor(model).forward(TREE)) == 2


def test_dropout_is_refused_in_training_mode_only():
    model = tiny_model("llama", attention_dropout=0.1).eval()
    run(model)


def test_model_gets_its_attention_back():
    model = tiny_model("llama")
    ids = torch.arange(3, 9)[None]
    before = model(ids).logits
    run(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, before)


def test_our_attention_outside_an_executor_is_an_error():
    model = tiny_model("llama")
    model.set_attn_implementation("areal_dta")
    with pytest.raises(RuntimeError, match="outside a TreeExecutor"):
        model(torch.arange(3, 9)[None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_tokens": 0}, "block_tokens=0"),
        ({"retain_tokens": -1}, "retain_tokens=-1"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ExecutorConfig(**options)


def test_unknown_kernel_is_named():
    config = ExecutorConfig(kernel="flsh")
    with pytest.raises(ValueError, match="'flsh'.*flash_cpu"):
        TreeExecutor(tiny_model("llama"), config).forward(TREE)


def test_names_of_0_1_still_work():
    assert importlib.import_module("areal_dta.executor.reference") is oracle
    config = ExecutorConfig(attention_backend="reference")
    assert config == ExecutorConfig(kernel="masked_softmax")
    assert dataclasses.replace(config, block_tokens=8).kernel == "masked_softmax"


def test_an_attention_that_a_user_registered():
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def sharper(module, query, *args, **kwargs):
        return sdpa_attention_forward(module, 2 * query, *args, **kwargs)

    AttentionInterface.register("sharper", sharper)
    model = tiny_model("llama")
    model.set_attn_implementation("sharper")
    with pytest.raises(UnsupportedModelError, match="'sharper' is an attention"):
        run(model)


def test_a_layer_that_is_checkpointed_by_hand():
    from torch.utils.checkpoint import checkpoint

    model = tiny_model("qwen3")
    layer = model.model.layers[1]
    original = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(
        original, *args, use_reentrant=False, **kwargs
    )
    with pytest.raises(RuntimeError, match="checkpointed runs again in the backward"):
        run(model)
