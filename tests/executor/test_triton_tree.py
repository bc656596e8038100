"""Tree attention in Triton gives what plain softmax gives, in the interpreter.

The interpreter is slow: shapes are small, and tiles too, so that there are several.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.executor.kernels import (
    KERNELS,
    Mask,
    PathKeys,
    Scoring,
    Term,
    select_kernel,
    triton_ops,
    triton_tree,
)
from areal_dta.executor.kernels.flash_triton import FlashTritonKernel
from areal_dta.executor.kernels.triton_tree import Tiling
from areal_dta.executor.layout.block_layout import BlockShape
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.executor.test_parity import SPECIAL, compare
from tests.models import VOCAB_SIZE, gradients, relative_error, tiny_model

KERNEL, ORACLE = KERNELS["triton_tree"], KERNELS["masked_softmax"]
needs_interpreter = pytest.mark.skipif(
    not triton_ops.is_interpreted(), reason="needs Triton with TRITON_INTERPRET=1"
)
pytestmark = needs_interpreter

SHAPES = {
    "one query": ([1], [-1]),
    "a chain": ([23, 18], [-1, 0]),
    "a fork": ([20, 9, 13], [-1, 0, 0]),
    "levels": ([5, 4, 3, 6, 2, 9, 1], [-1, 0, 1, 1, 0, 4, 4]),
    "roots": ([7, 1, 30, 2], [-1, -1, -1, 2]),
    "many leaves": ([3] + [1] * 30, [-1] + [0] * 30),
    "dead tiles": ([10, 40, 40], [-1, 0, 0]),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    tiling = Tiling(16, 16, 16, 16)
    monkeypatch.setattr(triton_tree, "choose_tiling", lambda *args: tiling)


def depths_of(shape, num_path):
    lengths, parents = shape
    ends, depth = [], []
    for n, parent in zip(lengths, parents, strict=True):
        start = ends[parent] if parent >= 0 else num_path
        depth += range(start, start + n)
        ends.append(start + n)
    return torch.tensor(depth)


def case(shape, num_path, group=2, width=16, dtype=torch.float64, window=None, seed=0):
    """Return q, grad_out, the term for this kernel, and the oracle's for one matrix."""
    block = BlockShape(*shape)
    size, num_kv = block.num_tokens, 2
    draw = torch.Generator().manual_seed(seed)

    def random(heads, n):
        x = torch.randn(1, n, heads, width, generator=draw, dtype=torch.float64)
        return x.to(dtype).transpose(1, 2)

    q, grad_out = random(num_kv * group, size), random(num_kv * group, size)
    k, v = random(num_kv, size), random(num_kv, size)
    path_k, path_v = random(num_kv, num_path), random(num_kv, num_path)
    depth = depths_of(shape, num_path)
    # What the oracle sees: the definition.
    at = torch.arange(size)
    last = torch.from_numpy(block.last_S)
    own = (at[None] <= at[:, None]) & (at[:, None] < last[None])
    visible = torch.cat([own.new_ones(size, num_path), own], 1)
    start = 0
    if window is not None:
        key_depth = torch.cat([torch.arange(num_path), depth])
        visible &= depth[:, None] - key_depth[None] < window
        start = min(num_path, max(0, int(depth.min()) - window + 1))
    scoring = Scoring(0.3)
    plain = Term(
        torch.cat([path_k, k], 2),
        torch.cat([path_v, v], 2),
        Mask(visible=visible),
        scoring,
    )
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    grads = [torch.ones(x.shape, dtype=acc) for x in (path_k, path_v)]
    path = PathKeys(
        *(x[:, :, start:] for x in (path_k, path_v)),
        start,
        *(x[:, :, start:] for x in grads),
    )
    mask = Mask(block, window=window, depth_S=depth)
    term = Term(k, v, mask, scoring, path if num_path > start else None)
    return q, grad_out, term, plain, grads


def check(tolerance, softcap=None, **options):
    q, grad_out, term, plain, path_grads = case(**options)
    scoring = Scoring(0.3, softcap)
    term, plain = term._replace(scoring=scoring), plain._replace(scoring=scoring)
    plain = Term(plain.k.double(), plain.v.double(), *plain[2:])
    want = ORACLE.forward(q.double(), plain)
    out, lse = KERNEL.forward(q, term)
    want_grads = ORACLE.backward(grad_out.double(), q.double(), *want, plain)
    grad_q, *own = KERNEL.backward(grad_out, q, out, lse, term)
    above = [x.double() - 1 for x in path_grads]  # what was there before stays
    pairs = [(out, want[0]), (lse, want[1]), (grad_q, want_grads[0])]
    for got, path_grad, wanted in zip(own, above, want_grads[1:], strict=True):
        pairs.append((torch.cat([path_grad, got.double()], 2), wanted))
    for got, wanted in pairs:
        assert got.shape == wanted.shape
        error = float((got.double() - wanted).norm())
        assert error <= tolerance * max(1.0, float(wanted.norm()))
    assert out.dtype == grad_q.dtype == q.dtype


QUICK = [("one query", 0), ("one query", 20), ("a chain", 16), ("levels", 0),
         ("levels", 37), ("roots", 1)]  # fmt: skip


@pytest.mark.parametrize(("shape", "num_path"), QUICK)
def test_shapes(shape, num_path):
    check(1e-12, shape=SHAPES[shape], num_path=num_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_path", [0, 1, 16, 37])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_shapes(shape, num_path):
    check(1e-12, shape=SHAPES[shape], num_path=num_path)


@pytest.mark.parametrize(("shape", "window"), [("a chain", 5), ("levels", 17)])
def test_windows(shape, window):
    check(1e-12, shape=SHAPES[shape], num_path=37, window=window)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 5, 17, 60])
@pytest.mark.parametrize("shape", ["a chain", "levels", "dead tiles"])
def test_more_windows(shape, window):
    check(1e-12, shape=SHAPES[shape], num_path=37, window=window)


@pytest.mark.parametrize("softcap", [0.4, 30.0])
def test_soft_caps(softcap):
    check(1e-12, softcap, shape=SHAPES["levels"], num_path=20)
    check(2e-6, softcap, shape=SHAPES["levels"], num_path=20, dtype=torch.float32)


def slowly(*values):
    return [pytest.param(x, marks=pytest.mark.slow) for x in values]


@pytest.mark.parametrize("group", [3, 8, *slowly(1, 4, 7)])
def test_grouped_heads(group):
    check(1e-12, shape=SHAPES["levels"], num_path=19, group=group)


@pytest.mark.parametrize("width", [24, 128, *slowly(8, 64, 80, 256)])
def test_head_sizes(width):
    check(1e-12, shape=SHAPES["roots"], num_path=19, width=width)


# In half precision weights and results are rounded: measured 0.8 of the dtype's eps.
HALF = {
    dtype: 1.28 * torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)
}
DTYPES = {torch.float32: 1e-6, **HALF}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["levels", *slowly("a fork", "dead tiles")])
def test_rounding(shape, dtype):
    """All that may differ: weights are rounded to the dtype, and results."""
    check(DTYPES[dtype], shape=SHAPES[shape], num_path=37, dtype=dtype)


def test_tiles_that_nobody_sees_are_not_listed():
    block = BlockShape(*SHAPES["dead tiles"])
    last = torch.from_numpy(block.last_S)
    tiles, counts = torch.ops.areal_dta.tree_tiles(last, last, 2, 0, 16, 16)
    for tile, (listed, count) in enumerate(zip(tiles, counts, strict=True)):
        queries = range(tile * 8, min(tile * 8 + 8, block.num_tokens))
        seen = {j // 16 for i in queries for j in range(i + 1) if i < last[j]}
        assert listed[:count].tolist() == sorted(seen)
    assert int(counts[-1]) < -(-block.num_tokens // 16)
    # Under a window fewer.
    depth = depths_of(SHAPES["dead tiles"], 0)
    _, fewer = torch.ops.areal_dta.tree_tiles(last, depth, 2, 5, 16, 16)
    assert int(fewer.sum()) < int(counts.sum())


def test_the_same_input_gives_the_same_bits():
    results = []
    for _ in range(2):
        q, do, term, _, grads = case(SHAPES["levels"], 37, dtype=torch.bfloat16)
        out, lse = KERNEL.forward(q, term)
        results.append([out, lse, *KERNEL.backward(do, q, out, lse, term), *grads])
    assert all(map(torch.equal, *results))


def test_operators_tell_their_shapes():
    """What a meta run sees is what a run gives."""
    q, do, term, _, _ = case(SHAPES["levels"], 37, dtype=torch.bfloat16)
    out, lse = KERNEL.forward(q, term)
    grads = KERNEL.backward(do, q, out, lse, term)

    def meta(x):
        return x if x is None or isinstance(x, int) else x.to("meta")

    path = PathKeys(*map(meta, term.path))
    mask = Mask(term.mask.shape, depth_S=meta(term.mask.depth_S))
    far = Term(meta(term.k), meta(term.v), mask, term.scoring, path)
    far_out, far_lse = KERNEL.forward(meta(q), far)
    far_grads = KERNEL.backward(meta(do), meta(q), far_out, far_lse, far)
    for a, b in zip([out, lse, *grads], [far_out, far_lse, *far_grads], strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


CONFIG = {"kernel": "triton_tree"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama-gqa4"])
def test_a_model_in_fp64(name):
    model = tiny_model(name, torch.float64)
    batch = random_batch(np.random.default_rng(1), 6, 14, VOCAB_SIZE)
    batch.append(batch[0])
    for block_tokens, retain_tokens in [(7, 0), (32, None)]:
        compare(model, batch, ExecutorConfig(block_tokens, retain_tokens, **CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "mistral", "gpt_oss"])
def test_models_with_windows_soft_caps_and_sinks(name):
    eager = {"attn_implementation": "eager"} if name != "mistral" else {}
    model = tiny_model(name, torch.float32, **SPECIAL[name], **eager)
    batch = random_batch(np.random.default_rng(11), 6, 14, VOCAB_SIZE)
    compare(model, batch, ExecutorConfig(9, 10, **CONFIG))


def errors_of(dtype, config):
    """Return the error of dense and of tree gradients against fp64."""
    truth, model = tiny_model("qwen3", torch.float64), tiny_model("qwen3", dtype)
    with torch.no_grad():
        for p64, p in zip(truth.parameters(), model.parameters(), strict=True):
            p.copy_(p64)
            p64.copy_(p)
    batch = random_batch(np.random.default_rng(7), 8, 24, VOCAB_SIZE)

    def loss(index, logprobs, entropy):
        return -logprobs.sum() + 0.1 * entropy.sum()

    oracle.forward_backward(truth, batch, loss)
    want = gradients(truth)
    oracle.forward_backward(model, batch, loss)
    dense = relative_error(gradients(model), want)
    TreeExecutor(model, config).forward_backward(PrefixTree.from_sequences(batch), loss)
    return dense, relative_error(gradients(model), want)


@pytest.mark.parametrize("dtype", [torch.float32, *slowly(torch.bfloat16)], ids=str)
def test_a_model_is_no_further_from_fp64_than_dense(dtype):
    dense, tree = errors_of(dtype, ExecutorConfig(16, 0, **CONFIG))
    assert tree <= 1.5 * dense


def test_it_is_refused_without_triton_or_a_gpu(monkeypatch):
    q, _, term, _, _ = case(SHAPES["a fork"], 5, dtype=torch.bfloat16)
    assert select_kernel("triton_tree", q, term.k, term.v, term.scoring) is KERNEL
    assert select_kernel("auto", q, term.k, term.v, term.scoring).name == "flash_cpu"
    for gone in ("is_installed", "is_interpreted"):
        with monkeypatch.context() as patch:
            patch.setattr(triton_tree, gone, lambda: False)
            with pytest.raises(ValueError, match="device=cpu.*needs Triton, a GPU"):
                select_kernel("triton_tree", q, term.k, term.v, term.scoring)


@pytest.mark.parametrize(
    ("block_tokens", "retain"), [(9, None), pytest.param(25, 0, marks=pytest.mark.slow)]
)
def test_flash_attention_for_paths_and_triton_for_branches(
    monkeypatch, block_tokens, retain
):
    """Flash attention's place is taken by its twin for CPUs."""
    calls = {"flash_cpu": 0, "triton_tree": 0}
    for name in calls:
        kernel = type(KERNELS[name])

        def forward(self, q, term, own=kernel.forward, name=name):
            calls[name] += 1
            shape = term.mask.shape
            is_tree = shape is not None and not shape.is_chain
            assert is_tree == (name == "triton_tree")
            return own(self, q, term)

        monkeypatch.setattr(kernel, "forward", forward)
    mixed = FlashTritonKernel(KERNELS["flash_cpu"], KERNELS["triton_tree"])
    monkeypatch.setitem(KERNELS, "flash_triton", mixed)
    model = tiny_model("qwen3", torch.float64)
    batch = random_batch(np.random.default_rng(3), 6, 14, VOCAB_SIZE)
    compare(model, batch, ExecutorConfig(block_tokens, retain, kernel="flash_triton"))
    assert all(calls.values())
    q, _, term, _, _ = case(SHAPES["a fork"], 5, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a GPU of compute capability.*; and Triton"):
        own = FlashTritonKernel(KERNELS["flash_cuda"], KERNELS["triton_tree"])
        monkeypatch.setitem(KERNELS, "flash_triton", own)
        select_kernel("flash_triton", q, term.k, term.v, term.scoring)


@pytest.mark.slow
def test_it_compiles_for_gpus_that_are_not_there():
    """Types, shared memory and matrix instructions are the compiler's business."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.executor.compile_triton"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 9 + 20
    for row in rows:
        limit = {90: 227, 80: 163}[row["capability"]] * 1024
        assert row["shared_bytes"] <= limit
        if "head_dim" in row:
            assert row["wgmma" if row["capability"] == 90 else "mma"] > 0
        else:  # fused layers: 8 or 16 bytes per load, nothing spilled to memory
            assert row["wide_loads"] > 0 and row["local_bytes"] == 0
