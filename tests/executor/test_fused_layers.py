"""Fused norms, SwiGLU and rotary embeddings give what plain PyTorch gives, in Triton's
interpreter; layers that compute something else are left alone."""

import copy
import sys

import numpy as np
import pytest
import torch

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.executor.fused import (
    FusedLayers,
    layers,
    operators,
    rms_norm,
    rotate,
    swiglu,
)
from areal_dta.executor.kernels.triton_ops import is_interpreted
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.executor.test_parity import compare
from tests.models import VOCAB_SIZE, relative_error, tiny_model

pytestmark = pytest.mark.skipif(
    not is_interpreted(), reason="needs Triton with TRITON_INTERPRET=1"
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def plain_norm(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up


def plain_rotate(q, k, cos, sin):
    def one(x):
        low, high = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]

    return one(q), one(k)


def check(run, plain, inputs, constants=(), seed=1):
    """Compare outputs and gradients with fp64 from the same inputs. Half precision is
    rounded once: no element is further off than that, and what fp32 lost before. (The
    interpreter cuts bf16 off where a GPU rounds: twice as much.)"""
    dtype = inputs[0].dtype
    draw = torch.Generator().manual_seed(seed)
    found = []
    for function, to in ((run, dtype), (plain, torch.float64)):
        own = [x.detach().to(to).requires_grad_() for x in inputs]
        outs = function(*own, *(x.to(to) for x in constants))
        outs = outs if isinstance(outs, tuple) else (outs,)
        if not found:
            grads = [
                torch.randn(x.shape, generator=draw, dtype=torch.float64).to(dtype)
                for x in outs
            ]
        of_inputs = torch.autograd.grad(outs, own, [g.to(to) for g in grads])
        found.append([*outs, *of_inputs])
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        got = got.detach().double()
        if dtype in TOLERANCE:
            assert relative_error(got, want.detach()) <= TOLERANCE[dtype]
            continue
        info = torch.finfo(dtype)
        share = 1.0 if dtype == torch.bfloat16 else 0.5
        bound = share * info.eps * (1 + 1e-3) * want.abs() + 1e-5 * want.abs().max()
        bound += info.smallest_normal * info.eps  # of numbers that are subnormal
        assert bool(((got - want).abs() <= bound).all())


def random(*shape, dtype=torch.float64, seed=0, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 8), (1, 7, 48), (1, 70, 4, 128), (3, 4100), (0, 16)]
)
def test_norms(shape, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    if not x.numel():
        x.requires_grad_()
        rms_norm(x, weight, 1e-6).sum().backward()
        assert x.grad.shape == shape
        return
    check(lambda y, w: rms_norm(y, w, 1e-6), plain_norm, [x, weight])


def test_a_norm_s_weight_gradient_is_summed_over_many_programs(monkeypatch):
    monkeypatch.setattr(operators, "_MAX_PROGRAMS", 3)
    monkeypatch.setattr(operators, "_TILE_ELEMENTS", 64)
    x, weight = random(1, 101, 16), random(16, seed=1)
    check(lambda y, w: rms_norm(y, w, 1e-6), plain_norm, [x, weight])


def test_a_norm_of_tiny_and_of_strided_rows():
    x = (
        random(6, 1, 32).transpose(0, 1)
        * torch.tensor([1e-9, 1e-3, 1, 1, 10, 1e3])[None, :, None]
    )
    check(lambda y, w: rms_norm(y, w, 1e-6), plain_norm, [x, random(32, seed=1)])


def test_a_frozen_weight_costs_no_gradient():
    x, weight = random(5, 16).requires_grad_(), random(16, seed=1)
    out = rms_norm(x, weight, 1e-6)
    (grad,) = torch.autograd.grad(out.sum(), [x])
    y = x.detach().requires_grad_()
    (want,) = torch.autograd.grad(plain_norm(y, weight).sum(), [y])
    assert relative_error(grad, want) <= 1e-12
    none = torch.ops.areal_dta.rms_norm_backward(out, x, weight, 1e-6, False)[1]
    assert none.numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 11, 200), (0, 8)])
def test_swiglu(shape, dtype):
    inputs = [random(*shape, dtype=dtype, seed=s, scale=4.0) for s in (0, 1)]
    if inputs[0].numel():
        check(swiglu, plain_swiglu, inputs)
    else:
        assert swiglu(*inputs).shape == shape


def test_swiglu_far_from_zero():
    gate = torch.tensor([-1e4, -800.0, -90.0, 0.0, 90.0, 1e4])
    check(swiglu, plain_swiglu, [gate, random(6, dtype=torch.float32)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), [((1, 1), 2), ((6, 2), 24), ((5, 5), 128)])
def test_rotary_embeddings(heads, size, dtype):
    num_tokens = 9
    q, k = (random(1, num_tokens, n, size, dtype=dtype, seed=n) for n in heads)
    # Halves of a head may turn by different angles: nothing is assumed.
    cos, sin = (random(1, num_tokens, size, dtype=dtype, seed=s) for s in (7, 8))
    for layout in (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2).clone()):
        check(rotate, plain_rotate, [layout(q), layout(k)], [cos, sin])
    out, _ = rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    assert out.transpose(1, 2).is_contiguous()  # what attention reads


def test_rotary_embeddings_of_which_one_is_unused():
    q, k = (random(1, n, 5, 8, seed=n).requires_grad_() for n in (4, 2))
    cos, sin = random(1, 5, 8, seed=7), random(1, 5, 8, seed=8)
    _, got = rotate(q, k, cos, sin)
    grads = torch.autograd.grad(got.sum(), [q, k])
    _, want = plain_rotate(q, k, cos, sin)
    (expected,) = torch.autograd.grad(want.sum(), [k])
    assert not grads[0].any()
    assert relative_error(grads[1], expected) <= 1e-12


def batch_of(seed=0):
    return random_batch(np.random.default_rng(seed), 4, 7, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float64, {"block_tokens": 4}),
        (torch.float32, {"block_tokens": 4}),
        (torch.float64, {"block_tokens": 64, "recompute": "mlp"}),
        (torch.float64, {"block_tokens": 6, "retain_tokens": 0}),
        (torch.float64, {"block_tokens": 8, "kernel": "triton_tree"}),
    ],
    ids=str,
)
def test_a_whole_model(dtype, options):
    """Qwen3 on a tree, fused, equals single sequences through its own layers."""
    model = tiny_model("qwen3", dtype)
    compare(model, batch_of(), ExecutorConfig(**options, fused_layers="on"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "mistral", "olmo2"])
def test_other_models(name):
    experts = {"experts_implementation": "eager"} if "moe" in name else {}
    model = tiny_model(name, torch.float64, **experts)
    compare(model, batch_of(1), ExecutorConfig(16, fused_layers="on"))


def test_kernels_are_what_runs(monkeypatch):
    """Each layer calls its kernel once per block, and between calls none does."""
    called = []
    for name in ("_RMSNorm", "_SwiGLU", "_Rotate"):
        function = getattr(operators, name)

        def apply(*args, name=name, own=function.apply):
            called.append(name)
            return own(*args)

        monkeypatch.setattr(function, "apply", apply)
    model = tiny_model("qwen3")
    executor = TreeExecutor(model, ExecutorConfig(64, fused_layers="on"))
    executor.fuse()
    called.clear()
    executor.profile(find_randomness=False)
    called.clear()
    executor.forward(PrefixTree.from_sequences([[1, 2, 3, 4], [1, 2, 5]]))
    assert executor.last_stats.num_blocks == 1
    assert called.count("_SwiGLU") == 2 and called.count("_Rotate") == 2
    assert called.count("_RMSNorm") == 2 * 4 + 1
    called.clear()
    tokens = torch.tensor([[1, 2, 3]])
    model(input_ids=tokens)
    assert not called
    assert "forward" not in vars(model.model.norm)


def test_gemma_s_norm_is_left_and_named():
    model = tiny_model("gemma3_text")
    message = "Gemma3RMSNorm: another formula: a relative difference of .*use auto"
    with pytest.raises(ValueError, match=message):
        FusedLayers(model, "on")


def test_behaviour_decides_not_the_name(monkeypatch):
    """One norm of a model adds to its weight: it alone stays, and results are right."""
    model = tiny_model("qwen3", torch.float64)
    norm = type(model.model.norm)

    class OtherRMSNorm(norm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + hidden_states * self.weight * 1e-3

    model.model.norm.__class__ = OtherRMSNorm
    with pytest.raises(ValueError, match="OtherRMSNorm: another formula"):
        FusedLayers(model, "on")
    # What auto does on a GPU:
    monkeypatch.setattr(layers, "_device_problem", lambda device, choice: None)
    fused = FusedLayers(model, "auto")
    assert fused.replaced == {
        "Qwen3RMSNorm": 8,
        "Qwen3MLP": 2,
        "apply_rotary_pos_emb": 1,
    }
    assert list(fused.left) == ["OtherRMSNorm"]
    assert "as they are: OtherRMSNorm (another formula" in str(fused)
    compare(model, batch_of(), ExecutorConfig(16, fused_layers="auto"))


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_another_epsilon_or_activation_is_another_formula(factor):
    model = tiny_model("qwen3")
    norm = model.model.layers[0].input_layernorm

    def forward(self, hidden_states, eps=norm.variance_epsilon * factor):
        plain = hidden_states.pow(2).mean(-1, keepdim=True) + eps
        return self.weight * hidden_states * torch.rsqrt(plain)

    norm.__class__ = type("OwnRMSNorm", (type(norm),), {"forward": forward})
    mlp = model.model.layers[0].mlp
    mlp.act_fn = torch.nn.GELU() if factor < 1 else torch.nn.SiLU()
    with pytest.raises(ValueError, match="OwnRMSNorm") as found:
        FusedLayers(model, "on")
    assert ("Qwen3MLP: another formula" in str(found.value)) == (factor < 1)


def test_devices_that_cannot_run_kernels(monkeypatch):
    model = tiny_model("qwen3")
    assert not FusedLayers(model, "auto").replaced  # a CPU: as it was
    assert not FusedLayers(model, "off").replaced
    monkeypatch.setattr(layers, "is_interpreted", lambda: False)
    with pytest.raises(ValueError, match="fused_layers=on: the model is on cpu"):
        FusedLayers(model, "on")
    with pytest.raises(ValueError, match="expected auto or on or off"):
        FusedLayers(model, "yes")
    with pytest.raises(ValueError, match="fused_layers='yes'"):
        ExecutorConfig(fused_layers="yes")


def test_installed_for_good():
    """The dense twin's way: the same results, by kernels, call after call."""
    model = tiny_model("qwen3", torch.float64)
    own = copy.deepcopy(model)
    modeling = sys.modules[type(model.model.norm).__module__]
    before = modeling.apply_rotary_pos_emb
    try:
        FusedLayers(model, "on").install()
        assert modeling.apply_rotary_pos_emb is not before
        tokens = torch.tensor([[1, 2, 3, 4, 5]])
        got, want = model(input_ids=tokens).logits, own(input_ids=tokens).logits
        assert relative_error(got, want) <= 1e-12
        assert FusedLayers(own, "on").replaced["apply_rotary_pos_emb"] == 1
    finally:
        modeling.apply_rotary_pos_emb = before
