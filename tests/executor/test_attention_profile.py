"""What a model asks for by any channel is exact or refused: one test per kind."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn

from areal_dta.executor import (
    ExecutorConfig,
    TreeExecutor,
    UnsupportedModelError,
    oracle,
)
from areal_dta.executor.checks.attention_profile import window_of
from areal_dta.schedule import FlopModel
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.models import VOCAB_SIZE, gradients, relative_error, tiny_model

BATCH = random_batch(np.random.default_rng(1), 8, 28, VOCAB_SIZE)
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "resid_pdrop": 0.0,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def loss(index, logprobs, entropy):
    generator = torch.Generator().manual_seed(index)
    weight = torch.randn(len(logprobs), generator=generator, dtype=torch.float64)
    weight = weight.to(logprobs.dtype)
    return (logprobs * weight).sum() + 0.3 * (entropy**2 * weight).sum()


def assert_exact(model, batch=BATCH, tolerance=1e-5, budgets=(3, 0)):
    """Hold logprobs and all gradients to one sequence at a time."""
    tree = PrefixTree.from_sequences(batch)
    executor = TreeExecutor(model, ExecutorConfig(*budgets))
    expected = oracle.sequence_outputs(model, batch)
    for got, want in zip(executor.forward(tree), expected, strict=True):
        assert relative_error(got.logprobs, want.logprobs) <= tolerance
    oracle.forward_backward(model, batch, loss)
    want = gradients(model)
    executor.forward_backward(tree, loss)
    assert relative_error(gradients(model), want) <= tolerance


def eager(name, **options):
    return tiny_model(name, attn_implementation="eager", **options)


@pytest.mark.parametrize("budgets", [(3, 0), (64, None)])
@pytest.mark.parametrize("trained", [
    "norm|lm_head|layers.1|layers.2", "lm_head", "layers.2.mlp",
    "layers.2.self_attn.q_proj", "layers.1.self_attn.v_proj", "embed_tokens",
])  # fmt: skip
def test_parts_of_a_model_are_trained(trained, budgets):
    model = tiny_model("qwen3", torch.float64, num_hidden_layers=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained.split("|")))
    assert_exact(model, tolerance=1e-10, budgets=budgets)


def test_nothing_is_trained():
    model = tiny_model("qwen3").requires_grad_(False)
    executor = TreeExecutor(model, ExecutorConfig(3, 0))
    value = executor.forward_backward(PrefixTree.from_sequences(BATCH), loss)
    assert value == pytest.approx(oracle.forward_backward(model, BATCH, loss), rel=1e-5)
    assert not gradients(model).any()


@pytest.mark.parametrize("layers", [None, [1]], ids=["all layers", "top layer"])
def test_adapters_without_input_gradients(layers):
    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=layers,
        task_type="CAUSAL_LM",
    )
    base = tiny_model("qwen3", torch.float64)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    assert_exact(model, tolerance=1e-10)


def test_positions_by_cache_position():
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB_SIZE, 200).tolist()
    batch = [shared + rng.integers(0, VOCAB_SIZE, 60).tolist() for _ in range(3)]
    assert_exact(eager("ministral3", rope_parameters=rope), batch, budgets=(64, None))


@pytest.mark.parametrize("options", [
    {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
], ids=str)  # fmt: skip
def test_scales_that_only_eager_reads(options):
    assert_exact(eager("gpt2", **GPT2, **options))


def test_an_option_that_only_eager_reads_is_refused(monkeypatch):
    from transformers.models.qwen3 import modeling_qwen3

    original = modeling_qwen3.eager_attention_forward

    def halved(module, q, *args, **kwargs):
        return original(module, q / (1 + module.layer_idx), *args, **kwargs)

    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", halved)
    executor = TreeExecutor(tiny_model("qwen3"))
    with pytest.raises(
        UnsupportedModelError, match=r"layer 1.*eager attention differs"
    ):
        executor.forward(PrefixTree.from_sequences(BATCH))


@pytest.mark.parametrize("budgets", [(5, 0), (64, None)])
def test_windows_that_are_only_in_the_mask(budgets):
    model = eager(
        "qwen2_moe",
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    )
    assert_exact(model, budgets=budgets)
    tokens = torch.arange(20)[None]  # the window has an effect
    with_window = model(tokens).logits
    model.config.layer_types = ["full_attention"] * 2
    assert not torch.allclose(model(tokens).logits, with_window, atol=1e-3)


@pytest.mark.parametrize("size", [1, 6, 512, 700, 4096, 2**20])
def test_a_window_is_read_from_its_mask_function(size):
    from transformers.masking_utils import (
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

    assert window_of(sliding_window_causal_mask_function(size)) == size
    assert window_of(causal_mask_function) is None
    with pytest.raises(ValueError, match="no causal sliding window"):
        window_of(chunked_causal_mask_function(size + 2, torch.zeros(1, dtype=int)))
    with pytest.raises(ValueError, match="not causal"):
        window_of(lambda b, h, q, k: (q - k).abs() < size + 1)
    with pytest.raises(ValueError, match="more than positions"):
        window_of(lambda b, h, q, k: torch.zeros(16)[q] == torch.zeros(16)[k])


def test_randomness_is_found_by_name_and_by_behaviour():
    tree = PrefixTree.from_sequences(BATCH)
    named = eager("mixtral", router_jitter_noise=0.1, **MIXTURE)
    with pytest.raises(UnsupportedModelError, match=r"router_jitter_noise=0\.1"):
        TreeExecutor(named).forward_backward(tree, loss)
    unnamed = eager("mixtral", **MIXTURE)
    unnamed.model.layers[1].mlp.jitter_noise = 0.1
    state = torch.random.get_rng_state()
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp.*random numbers"):
        TreeExecutor(unnamed).forward_backward(tree, loss)
    assert torch.equal(torch.random.get_rng_state(), state)
    TreeExecutor(unnamed.eval()).forward_backward(tree, loss)  # as it draws none


@pytest.mark.parametrize("change", ["forward", "hook", "class"])
def test_a_head_that_is_more_than_its_class(change):
    model = tiny_model("qwen3", torch.float64)
    head = model.lm_head
    plain = nn.Linear.forward
    if change == "forward":
        head.forward = lambda x: 0.5 * plain(head, x)
    elif change == "hook":
        head.register_forward_hook(lambda module, args, output: 0.5 * output)
    else:
        head.__class__ = type(
            "SlowLinear", (nn.Linear,), {"forward": lambda s, x: 0.5 * plain(s, x)}
        )
    assert_exact(model, tolerance=1e-10)
    assert ("forward" in vars(head)) == (change == "forward")


def test_a_head_in_another_dtype():
    model = tiny_model("qwen3", torch.bfloat16)
    weight = model.lm_head.weight
    model.lm_head.forward = lambda x: nn.functional.linear(x.float(), weight.float())
    assert_exact(model, tolerance=0.05)


def test_autocast_is_refused():
    executor = TreeExecutor(tiny_model("qwen3"))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UnsupportedModelError, match="autocast"),
    ):
        executor.forward(PrefixTree.from_sequences(BATCH))


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused(kind):
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(tiny_model("qwen3"), config)
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        TreeExecutor(model)


def test_positions_that_a_model_counts_by_itself_are_refused():
    model = eager("roberta", is_decoder=True, hidden_dropout_prob=0.0,
                  attention_probs_dropout_prob=0.0)  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"embed.*positions in its own way"):
        TreeExecutor(model).forward(PrefixTree.from_sequences(BATCH))


def test_more_keys_than_tokens_are_refused(monkeypatch):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    model = tiny_model("qwen3")
    original = Qwen3Attention.forward

    class Prepends:
        def update(self, key, value, *args, **kwargs):
            return torch.cat([key[:, :, :2], key], 2), torch.cat(
                [value[:, :, :2], value], 2
            )

    def forward(self, *args, **kwargs):
        return original(self, *args, **(kwargs | {"past_key_values": Prepends()}))

    monkeypatch.setattr(Qwen3Attention, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="16 queries and 18 keys"):
        TreeExecutor(model).forward(PrefixTree.from_sequences(BATCH))


def test_a_call_that_differs_from_the_first_is_refused():
    model = tiny_model("qwen3")
    executor = TreeExecutor(model)
    executor.forward(PrefixTree.from_sequences(BATCH))
    model.model.layers[1].self_attn.scaling = 0.5
    with pytest.raises(UnsupportedModelError, match=r"layer 1.*\(0\.5, None"):
        executor.forward(PrefixTree.from_sequences(BATCH))


def test_a_token_beyond_the_vocabulary_is_named():
    tree = PrefixTree.from_sequences([[3, 4], [3, 5, VOCAB_SIZE + 2]])
    executor = TreeExecutor(tiny_model("qwen3"))
    with pytest.raises(
        ValueError, match="sequence 1 has token id 42; expected 0 to 39"
    ):
        executor.forward(tree)


def test_layers_that_the_config_does_not_count():
    model = tiny_model("gpt2", **GPT2)
    model.config.n_layer = len(model.transformer.h) - 1
    with pytest.raises(UnsupportedModelError, match=r"num_hidden_layers=\d does not"):
        TreeExecutor(model).forward(PrefixTree.from_sequences(BATCH))


def test_sizes_that_differ_by_layer_are_named():
    config = tiny_model("qwen3").config
    config.intermediate_size = [48, 64]
    with pytest.raises(ValueError, match=r"intermediate_size=\[48, 64\]"):
        FlopModel.from_config(config)
