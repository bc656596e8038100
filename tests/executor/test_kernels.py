"""Every backend gives what plain softmax attention gives, whatever the shape."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from areal_dta.executor import ExecutorConfig
from areal_dta.executor.block_layout import BlockShape
from areal_dta.executor.kernels import KERNELS, Mask, Scoring
from areal_dta.executor.kernels.flash_cuda import (
    AtenKernels,
    FlashCudaKernel,
    Lengths,
)
from tests.builders import random_batch
from tests.executor.test_block_shape import shapes
from tests.executor.test_parity import compare
from tests.models import VOCAB_SIZE, gradients, relative_error, tiny_model

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SCORING = Scoring(scale=0.3)


class SlowKernels:
    """Attention of packed sequences, one pair at a time, as the kernels define it."""

    def _pairs(self, lengths: Lengths):
        q, k = lengths.cumulative_q.tolist(), lengths.cumulative_k.tolist()
        sizes = (np.diff(q).max(), np.diff(k).max())
        assert sizes == (lengths.longest_q, lengths.longest_k)
        for i in range(len(q) - 1):
            yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])

    def _term(self, q, k, lengths: Lengths):
        num_q, num_k = q.shape[0], k.shape[0]
        visible = torch.ones(num_q, num_k, dtype=torch.bool)
        if lengths.causal:
            visible = visible.tril(num_k - num_q)
        views = [x.transpose(0, 1)[None] for x in (q, k)]
        return *views, Mask(visible=visible)

    def forward(self, q, k, v, lengths, scale):
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1], q.shape[0])
        for rows, columns in self._pairs(lengths):
            q1, k1, mask = self._term(q[rows], k[columns], lengths)
            v1 = v[columns].transpose(0, 1)[None]
            part, part_lse = KERNELS["masked_softmax"].forward(
                q1, k1, v1, mask, Scoring(scale)
            )
            out[rows], lse[:, rows] = part[0].transpose(0, 1), part_lse[0]
        return out, lse

    def backward(self, grad_out, q, k, v, out, lse, lengths, scale):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for rows, columns in self._pairs(lengths):
            q1, k1, mask = self._term(q[rows], k[columns], lengths)
            v1 = v[columns].transpose(0, 1)[None]
            do, o = (x[rows].transpose(0, 1)[None] for x in (grad_out, out))
            parts = KERNELS["masked_softmax"].backward(
                do, q1, k1, v1, o, lse[None, :, rows], mask, Scoring(scale)
            )
            where = (rows, columns, columns)
            for grad, part, at in zip(grads, parts, where, strict=True):
                grad[at] = part[0].transpose(0, 1)
        return tuple(grads)


class OnAnyDevice(FlashCudaKernel):
    """The CUDA backend's own work on a CPU: all but its kernels."""

    name = "flash_cuda_slow"

    def __init__(self):
        super().__init__(SlowKernels())

    def supports(self, q, k, v, scoring):
        return scoring.softcap is None


@pytest.fixture
def slow_cuda(monkeypatch):
    monkeypatch.setitem(KERNELS, OnAnyDevice.name, OnAnyDevice())
    return OnAnyDevice.name


def tensors(num_queries: int, num_keys: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    sizes = [(HEADS, num_queries), *[(KV_HEADS, num_keys)] * 2, (HEADS, num_queries)]
    return [
        torch.randn(1, heads, n, WIDTH, generator=generator, dtype=torch.float64).to(
            dtype
        )
        for heads, n in sizes
    ]


def check(backend, q, k, v, grad_out, mask, tolerance=1e-12) -> None:
    reference = KERNELS["masked_softmax"]
    expected = reference.forward(q, k, v, copy.copy(mask), SCORING)
    got = backend.forward(q, k, v, mask, SCORING)
    want_grads = reference.backward(grad_out, q, k, v, *expected, mask, SCORING)
    got_grads = backend.backward(grad_out, q, k, v, *expected, mask, SCORING)
    pairs = [*zip(got, expected, strict=True), *zip(got_grads, want_grads, strict=True)]
    for a, b in pairs:
        assert a.shape == b.shape
        # of one key alone the gradient is zero, so not relative to that
        assert float((a - b).norm()) <= tolerance * max(1.0, float(b.norm()))


KERNELS_HERE = [KERNELS["flash_cpu"], OnAnyDevice()]


@pytest.mark.parametrize("backend", KERNELS_HERE, ids=lambda b: b.name)
@settings(max_examples=60, deadline=None)
@given(shape=shapes())
def test_a_block_with_itself(backend, shape):
    block = BlockShape(*shape)
    size = block.num_tokens
    check(backend, *tensors(size, size), Mask(block))


@pytest.mark.parametrize("backend", KERNELS_HERE, ids=lambda b: b.name)
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (200, 130)])
def test_a_path(backend, size):
    check(backend, *tensors(*size), Mask())


def test_a_chain_with_path_and_itself():
    mask = Mask(BlockShape([70, 30], [-1, 0]))
    check(OnAnyDevice(), *tensors(100, 350), mask)


@pytest.mark.parametrize("name", ["llama", "llama-gqa4", "qwen3-tied"])
@pytest.mark.parametrize("backend", ["flash_cpu", "slow_cuda"])
def test_blocks_of_many_tiles_in_a_model(name, backend, slow_cuda):
    """Long enough that blocks fall into several tiles, levels and joined chains."""
    model = tiny_model(name, torch.float64)
    rng = np.random.default_rng(3)
    batch = random_batch(rng, 6, 40, VOCAB_SIZE)
    long = rng.integers(0, VOCAB_SIZE, 330).tolist()
    batch += [long[:n] + rng.integers(0, VOCAB_SIZE, 90).tolist() for n in (150, 330)]
    batch += [long[:150] + [1, 2, 3], rng.integers(0, VOCAB_SIZE, 220).tolist()]
    backend = slow_cuda if backend == "slow_cuda" else backend
    for block_tokens, retain_tokens in [(512, None), (130, 0)]:
        compare(model, batch, ExecutorConfig(block_tokens, retain_tokens, 1.0, backend))


def test_the_kernels_of_this_pytorch_take_our_arguments():
    """Shapes and signatures, without a device."""
    q, k, v, grad = (
        x[0].transpose(0, 1).to("meta") for x in tensors(50, 120, torch.bfloat16)
    )
    lengths = Lengths.of([(0, 20), (20, 50)], [(0, 70), (70, 120)], True, q.device)
    kernels = AtenKernels()
    out, lse = kernels.forward(q, k, v, lengths, 0.3)
    assert out.shape == q.shape and lse.shape == (HEADS, 50)
    assert lse.dtype == torch.float32
    grads = kernels.backward(grad, q, k, v, out, lse, lengths, 0.3)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cuda_against_the_reference(dtype):
    """Rounding of the dtype is all that may differ."""
    backend = KERNELS["flash_cuda"]
    for mask, sizes in [
        (Mask(BlockShape([70, 30, 50], [-1, 0, 0])), (150, 150)),
        (Mask(BlockShape([33, 64, 5, 9], [-1, 0, 1, -1])), (111, 111)),
        (Mask(BlockShape([90], [-1])), (90, 700)),
        (Mask(), (90, 700)),
    ]:
        inputs = [x.cuda() for x in tensors(*sizes, dtype)]
        assert backend.supports(*inputs[:3], SCORING)
        check(backend, *inputs, mask, tolerance=2e-2)


@pytest.mark.gpu
def test_a_model_on_cuda_against_its_fp32_self():
    """Gradients in bf16 are as near to fp32 as dense ones are."""
    from areal_dta.executor import TreeExecutor, oracle
    from areal_dta.tree import PrefixTree

    sizes = {"head_dim": 64, "hidden_size": 128, "num_hidden_layers": 3}
    batch = random_batch(np.random.default_rng(5), 12, 300, VOCAB_SIZE)

    def loss(index, logprobs, entropy):
        return -logprobs.sum() + 0.1 * entropy.sum()

    def model(dtype):
        return tiny_model("qwen3", **sizes).to("cuda", dtype)

    exact = model(torch.float32)
    oracle.forward_backward(exact, batch, loss, 1.0)
    want = gradients(exact)
    half = model(torch.bfloat16)
    oracle.forward_backward(half, batch, loss, 1.0)
    dense_error = relative_error(gradients(half), want)
    executor = TreeExecutor(half, ExecutorConfig(block_tokens=256, retain_tokens=0))
    executor.forward_backward(PrefixTree.from_sequences(batch), loss)
    assert relative_error(gradients(half), want) <= 1.2 * dense_error
