"""Scans over trees of runs equal a loop over each path, and Transformers' functions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from areal_dta.executor.states.run_tree import CHUNK_SIZES, RunTree
from areal_dta.executor.states.scan import gated_delta_rule, state_space
from tests.models import relative_error

HEADS, KEY, VALUE = 2, 4, 3


@st.composite
def trees(draw):
    """Lengths and parents of segments in depth-first order, and some exits."""
    num = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(1, 40), min_size=num, max_size=num))
    parents, path = [-1], [0]
    for i in range(1, num):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(i)
    exits = draw(st.lists(st.integers(0, num - 1), unique=True))
    return lengths, parents, sorted(exits)


def path_of(runs, run):
    """Return the block positions from the top down to the end of a run."""
    positions = []
    while run >= 0:
        start = int(runs.starts[run])
        positions = [*range(start, start + runs.lengths[run]), *positions]
        run = runs.parents[run]
    return positions


def on_device(runs):
    found = runs.arrays([])
    return runs.on_device({key: torch.from_numpy(x) for key, x in found.items()})


def delta_loop(q, k, v, g, beta, state):
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        write = (v[t] - torch.einsum("nk,nkv->nv", k[t], state)) * beta[t][:, None]
        state = state + k[t][:, :, None] * write[:, None]
        outputs.append(torch.einsum("nk,nkv->nv", q[t] * KEY**-0.5, state))
    return torch.stack(outputs), state


def space_loop(x, a, b, c, state):
    outputs = []
    for t in range(len(x)):
        state = state * a[t].exp()[:, None, None] + b[t][:, :, None] * x[t][:, None]
        outputs.append(torch.einsum("nk,nkv->nv", c[t], state))
    return torch.stack(outputs), state


def inputs(kind, num_tokens, seed=0):
    torch.manual_seed(seed)
    wide = {"delta": (KEY, KEY, VALUE), "space": (VALUE, None, KEY, KEY)}[kind]
    drawn = []
    for width in wide:
        shape = (num_tokens, HEADS) if width is None else (num_tokens, HEADS, width)
        drawn.append(torch.randn(shape, dtype=torch.float64))
    if kind == "delta":
        drawn[1] = torch.nn.functional.normalize(drawn[1], dim=-1)
        drawn.append(-torch.rand(num_tokens, HEADS, dtype=torch.float64))
        drawn.append(torch.rand(num_tokens, HEADS, dtype=torch.float64))
    else:
        drawn[1] = -torch.rand(num_tokens, HEADS, dtype=torch.float64)
    return [x.requires_grad_() for x in drawn]


@pytest.mark.parametrize("kind", ["delta", "space"])
@settings(max_examples=25, deadline=None)
@given(tree=trees(), size=st.sampled_from(CHUNK_SIZES))
def test_a_tree_gives_what_its_paths_give(kind, tree, size):
    scan = {"delta": gated_delta_rule, "space": state_space}[kind]
    loop = {"delta": delta_loop, "space": space_loop}[kind]
    runs = RunTree(*tree)
    runs.chunk_size = size
    chunks = on_device(runs)
    x = inputs(kind, runs.num_tokens)
    entering = torch.randn(1, HEADS, KEY, VALUE, dtype=torch.float64).requires_grad_()
    out, states = scan(chunks, *x, entering)
    left = torch.cat(states)
    left = left[chunks.left] if chunks.left is not None else left[:0]
    weight, weight_left = torch.randn_like(out), torch.randn_like(left)
    loss = (out * weight).sum() + (left * weight_left).sum()
    grads = torch.autograd.grad(loss, [*x, entering])

    total = 0
    for run in range(len(runs.lengths)):
        path = path_of(runs, run)
        want, _ = loop(*(y[path] for y in x), entering[0])
        own = slice(len(path) - runs.lengths[run], None)
        assert relative_error(out[path][own], want[own]) <= 1e-12
        total = total + (want[own] * weight[path[own]]).sum()
    for i, run in enumerate(runs.exits):
        _, state = loop(*(y[path_of(runs, run)] for y in x), entering[0])
        assert relative_error(left[i], state) <= 1e-12
        total = total + (state * weight_left[i]).sum()
    want_grads = torch.autograd.grad(total, [*x, entering])
    for got, want in zip(grads, want_grads, strict=True):
        assert relative_error(got, want) <= 1e-11


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 130])
def test_a_chain_gives_what_transformers_gives(num_tokens):
    runs = RunTree([num_tokens], [-1], [0])
    q, k, v, g, beta = (x.detach().float() for x in inputs("delta", num_tokens, 1))
    out, states = gated_delta_rule(on_device(runs), q, k, v, g, beta, None)
    given = (x[None] for x in (q, k, v))
    want, state = torch_chunk_gated_delta_rule(
        *given, g=g[None], beta=beta[None], output_final_state=True
    )
    assert relative_error(out, want[0]) <= 1e-6
    assert relative_error(states[-1], state) <= 1e-6


@settings(max_examples=50, deadline=None)
@given(tree=trees(), width=st.integers(2, 5))
def test_convolutions_read_the_inputs_right_before(tree, width):
    runs = RunTree(*tree)
    arrays = runs.arrays([width])
    tail = width - 1
    source = np.arange(-tail, runs.num_tokens)  # negative: from the entering tail
    read = arrays.get(("tail", width, "read"))
    kept = arrays.get(("tail", width, "kept"))
    extended = source if read is None else source[read]
    kept = np.arange(tail, len(source)) if kept is None else kept
    for run in range(len(runs.lengths)):
        path = [*range(-tail, 0), *path_of(runs, run)]
        for i in range(len(path) - runs.lengths[run], len(path)):
            end = kept[path[i]] + 1
            assert extended[end - width : end].tolist() == path[i - tail : i + 1]
    left = arrays.get(("tail", width, "left"), np.empty(0, int)).reshape(-1, tail)
    for run, got in zip(runs.exits, left, strict=True):
        path = [*range(-tail, 0), *path_of(runs, run)]
        assert source[got].tolist() == path[-tail:]


def test_chunks_fit_the_runs():
    assert RunTree([512], [-1]).chunk_size == 64
    assert RunTree([16] * 32, [-1] * 32).chunk_size == 16
