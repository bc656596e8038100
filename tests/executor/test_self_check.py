"""The self-check: correct models pass, planted faults are found with their layer."""

import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from areal_dta.embedded import tiny_model_path
from areal_dta.executor import TreeExecutor, UnsupportedModelError
from areal_dta.executor import attention as attention_module
from areal_dta.executor import block as block_module
from areal_dta.executor import outputs as outputs_module
from areal_dta.executor.checks import self_check
from areal_dta.executor.checks.self_check import check_on_tiny_tree
from areal_dta.executor.kv_cache import PathCache
from tests.models import ARCHITECTURES, tiny_model

GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "resid_pdrop": 0.0,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip
WINDOW = {"sliding_window": 6}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": {},
    "qwen3": {},
    "qwen3-tied": {},
    "gpt2": GPT2,
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "qwen3_moe": ARCHITECTURES["qwen3_moe"],
    "gpt_oss": EXPERTS | WINDOW,
    "mixtral": EXPERTS,
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def build(name="qwen3", dtype=torch.float32, **overrides):
    options = {"num_hidden_layers": 3} | MODELS[name] | overrides
    return tiny_model(name, **options).to(dtype)


def has_no_gradients(model):
    return all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_correct_models_pass(name, dtype):
    if dtype == torch.float64 and "num_experts_per_tok" in MODELS[name]:
        pytest.skip("Transformers' experts have no fp64")
    model = build(name, dtype, attn_implementation="eager")
    check_on_tiny_tree(TreeExecutor(model))
    assert has_no_gradients(model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_critic_passes(value_model, dtype):
    torch.manual_seed(0)
    critic = type(value_model)(value_model.config).to(dtype).train()
    check_on_tiny_tree(TreeExecutor(critic, outputs="values"))
    assert has_no_gradients(critic)


@pytest.mark.parametrize("layers", [None, [1]], ids=["all layers", "one layer"])
def test_adapters_pass(layers):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"],
                        layers_to_transform=layers, task_type="CAUSAL_LM")  # fmt: skip
    model = get_peft_model(build(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.enable_input_require_grads()  # as AReaL does
    check_on_tiny_tree(TreeExecutor(model))
    assert has_no_gradients(model)


def test_a_head_in_another_dtype_passes():
    model = build()
    model.lm_head.to(torch.bfloat16)
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    check_on_tiny_tree(TreeExecutor(model))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_embedded_model_passes(dtype):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=dtype)
    check_on_tiny_tree(TreeExecutor(model.train()))


def test_everything_is_left_as_it_was():
    model = build()
    executor = TreeExecutor(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    config, state = executor.config, torch.random.get_rng_state()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    check_on_tiny_tree(executor)
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    assert executor.config is config
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config._attn_implementation == "sdpa"
    assert hooks == [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    ]


class _Allocations(TorchDispatchMode):
    """Elements of the largest tensor that is made, parameters apart."""

    def __init__(self, model):
        super().__init__()
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.largest = max(self.largest, storage.nbytes())
        return result


def test_nothing_of_the_size_of_a_weight_is_allocated():
    model = build(hidden_size=256, intermediate_size=1024, vocab_size=4000)
    executor = TreeExecutor(model)
    allocations = _Allocations(model)
    with allocations:
        check_on_tiny_tree(executor)
    num_tokens = 34
    logits = num_tokens * 4000 * 4  # those of the tree
    assert logits / 2 <= allocations.largest <= logits < model.lm_head.weight.nbytes / 4
    record = self_check._Record(model, num_tokens)
    with record.recording(), record.block(torch.arange(num_tokens)):
        model(torch.arange(num_tokens)[None])
    held = sum(x.nbytes for x in [*record.states.values(), *record.grads.values()])
    assert held == 2 * 4 * num_tokens * 256 * 4  # layers + 1, and both for fp32
    assert held < 0.01 * 4 * sum(p.nbytes for p in model.parameters())


def assert_found(model, match, outputs="logprobs"):
    executor = TreeExecutor(model, outputs=outputs)
    with pytest.raises(UnsupportedModelError, match=match):
        check_on_tiny_tree(executor)
    assert has_no_gradients(model)
    assert executor.config.block_tokens > 64


def change_attention(monkeypatch, layer, **changes):
    """Blocks, not the probe, compute a layer's attention otherwise."""
    original = attention_module.attend

    def attend(block, layer_idx, asked, *args):
        if layer_idx == layer:
            asked = attention_module.LayerAttention(
                **{n: getattr(asked, n) for n in asked.__slots__} | changes
            )
        return original(block, layer_idx, asked, *args)

    monkeypatch.setattr(attention_module, "attend", attend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dropped_window(monkeypatch, dtype):
    change_attention(monkeypatch, 0, window=None)
    assert_found(
        build("gemma3_text", dtype, attn_implementation="eager"),
        r"hidden states of layer 0 \(Gemma3DecoderLayer\) differ by .*tolerance.*"
        r"blocks of 5.*dense engine.*self_check=false",
    )


@pytest.mark.parametrize("layer", [0, 2])
def test_a_changed_scale(monkeypatch, layer):
    change_attention(monkeypatch, layer, scale=0.36)  # 0.3536
    assert_found(build(), rf"hidden states of layer {layer} ")


def test_positions_within_the_block(monkeypatch):
    original = block_module.model_inputs

    def model_inputs(model, token_S, depth_S):
        return original(model, token_S, torch.arange(len(token_S)))

    monkeypatch.setattr(block_module, "model_inputs", model_inputs)
    assert_found(build(), "hidden states of layer 0 ")
    assert_found(build("gpt2", attn_implementation="eager"), "the embedding")


def test_a_key_of_another_layer(monkeypatch):
    original = PathCache.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.layers[2] = self.layers[1]

    monkeypatch.setattr(PathCache, "__init__", init)
    assert_found(build(), r"hidden states of layer [12] ")


def test_a_head_in_half_precision(monkeypatch):
    original = outputs_module.fused_token_logprobs

    def fused(hidden, weight, *args):
        return original(hidden.bfloat16(), weight.bfloat16(), *args)

    monkeypatch.setattr(outputs_module, "fused_token_logprobs", fused)
    assert_found(build(), "logprobs of the head")


def test_an_expert_drawn_at_random():
    model = build("qwen3_moe")
    gate = model.model.layers[1].mlp.gate
    original = type(gate).forward

    def forward(self, hidden):
        return original(self, hidden + torch.randn_like(hidden))

    gate.forward = types.MethodType(forward, gate)
    assert_found(model, r"layers\.1\.mlp.*random numbers")


def test_an_expert_drawn_by_a_generator_of_its_own():
    """Seeds do not change it, so that only the comparison can find it."""
    model = build("qwen3_moe")
    gate = model.model.layers[1].mlp.gate
    original = type(gate).forward
    generator = torch.Generator().manual_seed(0)

    def forward(self, hidden):
        noise = torch.randn(hidden.shape, generator=generator)
        return original(self, hidden + noise * (len(hidden) != 16))  # not the probe

    gate.forward = types.MethodType(forward, gate)
    assert_found(model, r"hidden states of layer 1 ")


@pytest.mark.parametrize("channel", ["keys", "values"])
def test_gradients_that_do_not_reach_the_path(monkeypatch, channel):
    """The forward is right."""
    from areal_dta.executor.traversal import Traversal

    original = Traversal._backward

    def backward(self, block, opened):
        if opened is not None:
            grads = getattr(opened.trunk, f"grad_{channel[0]}")
            grads[1].zero_()
        original(self, block, opened)

    monkeypatch.setattr(Traversal, "_backward", backward)
    assert_found(build(), r"gradients of layer 1 ")
