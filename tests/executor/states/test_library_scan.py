"""The scan of flash-linear-attention, on a substitute with its signature.

The package needs a GPU. What is tested is when its function is taken, and that runs,
states and gradients go where they belong when it is.
"""

import inspect
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from areal_dta.executor import ExecutorConfig
from areal_dta.executor.states import library_scan
from areal_dta.executor.states.kinds import scan_line, stateful_layers
from areal_dta.executor.states.run_tree import RunTree
from tests.builders import random_batch
from tests.executor.states.test_parity import long_batch
from tests.executor.states.test_scan import delta_loop, inputs, path_of, trees
from tests.executor.test_parity import SHAPES, compare
from tests.models import VOCAB_SIZE, relative_error, tiny_model


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):
    """The signature of fla-core 0.6.0, and what it computes, token by token."""
    assert q.shape[0] == 1 and output_final_state and not kwargs and scale is None
    if use_qk_l2norm_in_kernel:
        q, k = (x * (x * x).sum(-1, keepdim=True).add(1e-6).rsqrt() for x in (q, k))
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    if cu_seqlens is not None:
        assert cu_seqlens_cpu.tolist() == ends
    if initial_state is None:
        shape = len(ends) - 1, v.shape[2], q.shape[3], v.shape[3]
        initial_state = v.new_zeros(shape, dtype=torch.float64)
    assert len(initial_state) == len(ends) - 1 and ends[-1] == q.shape[1]
    outputs, states = [], []
    for start, end, state in zip(ends[:-1], ends[1:], initial_state, strict=True):
        own = slice(start, end)
        # q is scaled by the loop for keys of its own size
        rescale = (4 / q.shape[-1]) ** 0.5
        given = q[0, own] * rescale, k[0, own], v[0, own], g[0, own], beta[0, own]
        out, state = delta_loop(*given, state)
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs)[None].to(v.dtype), torch.stack(states)


@pytest.fixture
def install(monkeypatch):
    """Let a function be that of the package, or the package be broken."""

    def of(function):
        library_scan.installed_delta_rule.cache_clear()
        package = ModuleType("fla.ops.gated_delta_rule")
        package.chunk_gated_delta_rule = function
        for name in ("fla", "fla.ops"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, package.__name__, package)

    yield of
    library_scan.installed_delta_rule.cache_clear()


@pytest.fixture
def on_a_gpu(install, monkeypatch):
    """Let CPU models be taken for models on a GPU; count the calls of the function."""
    calls = []

    def counted(*args, **options):
        calls.append(options["cu_seqlens"] if "cu_seqlens" in options else None)
        return chunk_gated_delta_rule(*args, **options)

    counted.__signature__ = inspect.signature(chunk_gated_delta_rule)
    install(counted)
    monkeypatch.setattr(library_scan, "DTYPES", (torch.float64,))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return calls


def test_the_function_with_the_known_signature_is_taken(install):
    install(chunk_gated_delta_rule)
    assert library_scan.installed_delta_rule() == (
        chunk_gated_delta_rule,
        "flash-linear-attention's, in fp16 and bf16",
    )


def swallows(q, k, v, g, beta, initial_state=None, output_final_state=False, **kwargs):
    pass


def value_first(
    q,
    k,
    v,
    g,
    beta,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    state_v_first=True,
):
    pass


def asks_for_more(
    q,
    k,
    v,
    g,
    beta,
    a_log,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    pass


def without_names(q, k, v, g, beta, initial_state, /, **kwargs):
    pass


@pytest.mark.parametrize(
    "function, why",
    [
        (swallows, "takes no use_qk_l2norm_in_kernel, cu_seqlens"),
        (value_first, "has state_v_first=True by default"),
        (asks_for_more, "asks for a_log"),
        (without_names, "takes no output_final_state, use_qk"),
        (min, "has no signature"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_another_signature_is_not(install, function, why):
    install(function)
    found, text = library_scan.installed_delta_rule()
    assert found is None
    assert text.startswith(f"chunk_gated_delta_rule of flash-linear-attention {why}")


def test_what_is_missing_is_named(install, monkeypatch):
    library_scan.installed_delta_rule.cache_clear()
    monkeypatch.setitem(sys.modules, "fla", None)
    found = library_scan.installed_delta_rule()
    assert found == (None, "flash-linear-attention is not installed")


def test_positional_only_is_no_name():
    def function(x, y, /):
        pass

    assert library_scan.why_unfit(function, "x y") == "takes no x, y by name"


def test_causal_conv1d_is_taken_by_its_signature():
    def causal_conv1d_fn(
        x,
        weight,
        bias=None,
        seq_idx=None,
        initial_states=None,
        return_final_states=False,
        final_states_out=None,
        activation=None,
    ):
        """That of causal-conv1d 1.7.0."""

    def other(x, weight, bias=None, activation=None):
        pass

    assert library_scan.fits_convolution(causal_conv1d_fn)
    assert not library_scan.fits_convolution(other)
    assert not library_scan.fits_convolution(None)


def test_a_function_is_not_used_on_a_cpu(install):
    install(chunk_gated_delta_rule)
    for name in ("qwen3_5_text", "olmo_hybrid"):
        assert not any(x.scans_runs for x in stateful_layers(tiny_model(name)))
    module = stateful_layers(tiny_model("qwen3_5_text"))[0].module
    # what a machine with a GPU gives every model, also one on the CPU
    module.causal_conv1d_fn = lambda **options: 1 / 0
    model = SimpleNamespace(modules=lambda: [module])
    taken = {name: x for _, name, x in stateful_layers(model)[0].attributes}
    assert taken["causal_conv1d_fn"] is None and callable(taken["forward"])


def test_what_scans_is_said(on_a_gpu):
    line = scan_line(tiny_model("qwen3_5_text"))
    assert line == (
        "3 layers scan their states (Qwen3_5GatedDeltaNet): "
        "flash-linear-attention's, in fp16 and bf16"
    )
    assert scan_line(tiny_model("lfm2")) is None


def test_why_our_scan_is_taken_is_said(on_a_gpu, install):
    install(swallows)
    line = scan_line(tiny_model("olmo_hybrid"))
    assert "in chunks, in PyTorch (chunk_gated_delta_rule of flash-linear-" in line
    assert "takes no use_qk_l2norm_in_kernel" in line
    line = scan_line(tiny_model("mamba2"))
    assert line == "2 layers scan their states (Mamba2Mixer): in chunks, in PyTorch"


def test_no_gpu_is_a_reason():
    line = scan_line(tiny_model("qwen3_next"))
    assert line.endswith("in chunks, in PyTorch (not on a GPU)")


@settings(max_examples=25, deadline=None)
@given(tree=trees())
def test_runs_of_a_tree_give_what_its_paths_give(tree):
    runs = RunTree(*tree)
    arrays = runs.arrays([], with_levels=True)
    levels = runs.levels_on_device({k: torch.from_numpy(x) for k, x in arrays.items()})
    x = inputs("delta", runs.num_tokens)
    entering = torch.randn(1, 2, 4, 3, dtype=torch.float64).requires_grad_()
    named = dict(zip(("q", "k", "v", "g", "beta"), (y[None] for y in x), strict=True))
    out, states = library_scan.delta_rule_by_runs(
        chunk_gated_delta_rule, levels, named, entering, False
    )
    left = torch.cat(states)
    left = left[levels.left] if levels.left is not None else left[:0]
    weight, weight_left = torch.randn_like(out), torch.randn_like(left)
    loss = (out * weight).sum() + (left * weight_left).sum()
    grads = torch.autograd.grad(loss, [*x, entering])

    total = 0
    for run in range(len(runs.lengths)):
        path = path_of(runs, run)
        want, _ = delta_loop(*(y[path] for y in x), entering[0])
        own = slice(len(path) - runs.lengths[run], None)
        assert relative_error(out[path][own], want[own]) <= 1e-12
        total = total + (want[own] * weight[path[own]]).sum()
    for i, run in enumerate(runs.exits):
        _, state = delta_loop(*(y[path_of(runs, run)] for y in x), entering[0])
        assert relative_error(left[i], state) <= 1e-12
        total = total + (state * weight_left[i]).sum()
    want_grads = torch.autograd.grad(total, [*x, entering])
    for got, want in zip(grads, want_grads, strict=True):
        assert relative_error(got, want) <= 1e-11


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "olmo_hybrid"])
@pytest.mark.parametrize("budgets", [(5, 10), (64, 0)])
def test_models_equal_one_sequence_at_a_time(on_a_gpu, name, budgets):
    model = tiny_model(name, torch.float64)
    batch = random_batch(np.random.default_rng(1), 5, 12, VOCAB_SIZE)
    compare(model, batch, ExecutorConfig(*budgets))
    has_branches = any(ends is not None for ends in on_a_gpu)
    assert on_a_gpu and has_branches == (budgets[0] == 64)
    assert all(x.scans_runs for x in stateful_layers(model))


def test_the_convolution_of_causal_conv1d(on_a_gpu):
    calls = []

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        calls.append(x.shape[2])
        assert seq_idx is None and activation == "silu"
        padded = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
        out = torch.nn.functional.conv1d(
            padded, weight[:, None], bias, groups=len(weight)
        )
        return torch.nn.functional.silu(out)

    model = tiny_model("qwen3_5_text", torch.float64)
    for layer in stateful_layers(model):
        layer.module.causal_conv1d_fn = causal_conv1d_fn
    batch = random_batch(np.random.default_rng(2), 5, 12, VOCAB_SIZE)
    compare(model, batch, ExecutorConfig(7, 0))
    # each run of a block has its tail before it
    assert max(calls) > max(map(len, batch))


def test_forks_and_long_runs(on_a_gpu):
    model = tiny_model("qwen3_5_text", torch.float64)
    for batch in (long_batch(0), *SHAPES.values()):
        compare(model, batch, ExecutorConfig(64, 0))
    assert on_a_gpu
