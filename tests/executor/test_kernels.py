"""Every kernel gives what plain softmax attention gives, whatever the shape."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.executor.kernels import (
    KERNELS,
    Mask,
    Scoring,
    Term,
    accumulation_dtype,
    masked_softmax,
)
from areal_dta.executor.kernels.flash_cuda import FlashCudaKernel, Lengths
from areal_dta.executor.kv_cache import PathCache
from areal_dta.executor.layout.block_layout import BlockShape
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.executor.test_block_layout import shapes
from tests.executor.test_parity import compare
from tests.models import VOCAB_SIZE, gradients, relative_error, tiny_model

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SCORING = Scoring(scale=0.3)
ORACLE = KERNELS["masked_softmax"]


class OnAnyDevice(FlashCudaKernel):
    """The CUDA kernel's own work on a CPU, with PyTorch's operators replaced.

    Attention of packed sequences, one pair at a time, as the operators define it.
    """

    name = "flash_cuda_slow"

    def supports(self, q, k, v, scoring):
        return scoring.softcap is None

    def _pairs(self, lengths: Lengths):
        q, k = lengths.cumulative_q.tolist(), lengths.cumulative_k.tolist()
        assert (np.diff(q).max(), np.diff(k).max()) == (lengths.max_q, lengths.max_k)
        for i in range(len(q) - 1):
            yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])

    def _term(self, k, v, num_queries, lengths: Lengths, scale) -> Term:
        visible = torch.ones(num_queries, len(k), dtype=torch.bool)
        if lengths.is_causal:
            visible = visible.tril(len(k) - num_queries)
        if lengths.window is not None:
            visible = visible.triu(len(k) - num_queries - lengths.window + 1)
        return Term(batched(k), batched(v), Mask(visible=visible), Scoring(scale))

    def attend(self, q, k, v, lengths, scale):
        out = torch.empty_like(q)
        acc = accumulation_dtype(q.dtype)  # as the operators give it
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=acc)
        for rows, columns in self._pairs(lengths):
            term = self._term(k[columns], v[columns], len(q[rows]), lengths, scale)
            part, part_lse = ORACLE.forward(batched(q[rows]), term)
            out[rows], lse[:, rows] = part[0].transpose(0, 1), part_lse[0]
        return out, lse

    def attend_backward(self, grad_out, q, k, v, out, lse, lengths, scale):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for rows, columns in self._pairs(lengths):
            term = self._term(k[columns], v[columns], len(q[rows]), lengths, scale)
            do, q1, o = (batched(x[rows]) for x in (grad_out, q, out))
            parts = ORACLE.backward(do, q1, o, lse[None, :, rows], term)
            where = (rows, columns, columns)
            for grad, part, at in zip(grads, parts, where, strict=True):
                grad[at] = part[0].transpose(0, 1)
        return tuple(grads)


def batched(packed):
    """[S, N, H] as [1, N, S, H]."""
    return packed.transpose(0, 1)[None]


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


def check(kernel, q, k, v, grad_out, mask, tolerance=1e-12) -> None:
    term, plain = Term(k, v, mask, SCORING), Term(k, v, copy.copy(mask), SCORING)
    expected = ORACLE.forward(q, plain)
    got = kernel.forward(q, term)
    want_grads = ORACLE.backward(grad_out, q, *expected, plain)
    got_grads = kernel.backward(grad_out, q, *expected, term)
    pairs = [*zip(got, expected, strict=True), *zip(got_grads, want_grads, strict=True)]
    for a, b in pairs:
        assert a.shape == b.shape
        # of one key alone the gradient is zero, so not relative to that
        assert float((a - b).norm()) <= tolerance * max(1.0, float(b.norm()))


KERNELS_HERE = [KERNELS["flash_cpu"], OnAnyDevice()]


@pytest.mark.parametrize("kernel", KERNELS_HERE, ids=lambda k: k.name)
@settings(max_examples=60, deadline=None)
@given(shape=shapes())
def test_a_block_with_itself(kernel, shape):
    block = BlockShape(*shape)
    size = block.num_tokens
    check(kernel, *tensors(size, size), Mask(block))


@pytest.mark.parametrize("kernel", KERNELS_HERE, ids=lambda k: k.name)
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (200, 130)])
def test_a_path(kernel, size):
    check(kernel, *tensors(*size), Mask())


def test_a_chain_with_path_and_itself():
    mask = Mask(BlockShape([70, 30], [-1, 0]))
    check(OnAnyDevice(), *tensors(100, 350), mask)


@pytest.mark.parametrize("window", [1, 7, 40, 99, 100, 349, 350])
def test_a_chain_under_a_window(window):
    """In one call: the operator's own window, aligned as its causal mask is."""
    shape = BlockShape([70, 30], [-1, 0])
    check(OnAnyDevice(), *tensors(100, 350), Mask(shape, window=window))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("size", [(1, 300), (64, 130), (200, 130)])
def test_scores_are_held_in_slices(monkeypatch, size, softcap):
    """The results are those of all scores at once."""
    scoring = Scoring(0.3, softcap)
    q, k, v, grad_out = tensors(*size)
    visible = torch.rand(size, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[:, 0] = True
    want, got = [], []
    for results, max_scores in [(want, 2**26), (got, 3 * HEADS * size[1])]:
        monkeypatch.setattr(masked_softmax, "MAX_SCORES", max_scores)
        term = Term(k, v, Mask(visible=visible), scoring)
        peak = LargestResult()
        with peak:
            results += ORACLE.forward(q, term)
            results += ORACLE.backward(grad_out, q, *results, term)
        assert peak.num_elements <= max(max_scores, k.numel(), q.numel())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class LargestResult(TorchDispatchMode):
    """The elements of the largest floating-point tensor that an operator returns."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.num_elements = max(self.num_elements, out.numel())
        return out


def test_many_terms_are_rounded_once():
    """A block of seven levels in bf16 differs from fp32 hardly more than one call."""
    shape = BlockShape([16] * 15, [-1, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12])
    assert len(shape.levels) == 7
    q, k, v, _ = tensors(240, 240)
    half = [x.bfloat16() for x in (q, k, v)]
    term = Term(*(x.double() for x in half[1:]), Mask(shape), SCORING)
    want, _ = ORACLE.forward(half[0].double(), term)

    def error(out) -> float:
        out = out.bfloat16().double()
        return float((out - want).norm() / want.norm())

    merged, _ = OnAnyDevice().forward(half[0], Term(*half[1:], Mask(shape), SCORING))
    whole, _ = ORACLE.forward(half[0], Term(*half[1:], Mask(shape), SCORING))
    assert merged.dtype == torch.float32
    assert error(merged) <= 1.8 * error(whole), (error(merged), error(whole))


def test_a_path_is_extended_in_place():
    """Also behind the longest path: the buffer has room for the deepest block."""
    path = PathCache([0], capacity=5, with_grad=True, room=3).layers[0]
    k, v = torch.randn(2, 1, KV_HEADS, 5, WIDTH)
    path.write(0, k, v, with_grad=True)
    more_k, more_v = torch.randn(2, 1, KV_HEADS, 3, WIDTH)
    for start in (0, 2):
        both_k, both_v = path.extended(start, 5, more_k, more_v)
        assert torch.equal(both_k, torch.cat([k[:, :, start:], more_k], 2))
        assert torch.equal(both_v, torch.cat([v[:, :, start:], more_v], 2))
        assert both_k.untyped_storage().data_ptr() == (
            path.read(0, 5)[0].untyped_storage().data_ptr()
        )


@pytest.mark.parametrize("window", [3, 20, 200])
def test_windows_of_a_model_by_joined_chains(window, slow_cuda):
    """Chains under a window take one call, branching blocks the masked softmax."""
    model = tiny_model("mistral", torch.float64, sliding_window=window)
    rng = np.random.default_rng(4)
    long = rng.integers(0, VOCAB_SIZE, 150).tolist()
    batch = [long, [*long[:100], 1, 2, 3], [*long[:120], 4, 5]]
    joined = []
    attend = OnAnyDevice.attend

    def watch(self, q, k, v, lengths, scale):
        joined.append(lengths.window)
        return attend(self, q, k, v, lengths, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnAnyDevice, "attend", watch)
        compare(model, batch, ExecutorConfig(32, 0, 1.0, slow_cuda))
    assert (window in joined) == (window < 150)


@pytest.mark.parametrize("name", ["llama", "llama-gqa4", "qwen3-tied"])
@pytest.mark.parametrize("kernel", ["flash_cpu", "slow_cuda"])
def test_blocks_of_many_tiles_in_a_model(name, kernel, slow_cuda):
    """Long enough that blocks fall into several tiles, levels and joined chains."""
    model = tiny_model(name, torch.float64)
    rng = np.random.default_rng(3)
    batch = random_batch(rng, 6, 40, VOCAB_SIZE)
    long = rng.integers(0, VOCAB_SIZE, 330).tolist()
    batch += [long[:n] + rng.integers(0, VOCAB_SIZE, 90).tolist() for n in (150, 330)]
    batch += [long[:150] + [1, 2, 3], rng.integers(0, VOCAB_SIZE, 220).tolist()]
    kernel = slow_cuda if kernel == "slow_cuda" else kernel
    for block_tokens, retain_tokens in [(512, None), (130, 0)]:
        compare(model, batch, ExecutorConfig(block_tokens, retain_tokens, 1.0, kernel))


def test_the_operators_of_this_pytorch_take_our_arguments():
    """Shapes and signatures, without a device."""
    q, k, v, grad = (
        x[0].transpose(0, 1).to("meta") for x in tensors(50, 120, torch.bfloat16)
    )
    ends = [
        torch.tensor(x, dtype=torch.int32, device="meta")
        for x in ([0, 20, 50], [0, 70, 120])
    ]
    kernel = KERNELS["flash_cuda"]
    for window in (None, 9):
        lengths = Lengths(*ends, 30, 70, is_causal=True, window=window)
        out, lse = kernel.attend(q, k, v, lengths, 0.3)
        assert out.shape == q.shape and lse.shape == (HEADS, 50)
        assert lse.dtype == torch.float32
        grads = kernel.attend_backward(grad, q, k, v, out, lse, lengths, 0.3)
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("size", [(50, 120), (1, 120)])
def test_one_pair_is_a_batch_of_one(size):
    """Without lengths the operator splits keys; shapes are those of packed calls."""
    called = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_flash_attention_forward" in str(func):
                called.append((args[0].shape, args[3], args[4]))
            return func(*args, **(kwargs or {}))

    q, k, v, _ = (
        x[0].transpose(0, 1).to("meta") for x in tensors(*size, torch.bfloat16)
    )
    ends = (torch.zeros(2, dtype=torch.int32, device="meta") for _ in range(2))
    lengths = Lengths(*ends, *size, is_causal=True)
    with Watch():
        out, lse = KERNELS["flash_cuda"].attend(q, k, v, lengths, 0.3)
    assert called == [((1, *q.shape), None, None)]
    assert out.shape == q.shape and lse.shape == (HEADS, size[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cuda_against_masked_softmax(dtype):
    """Rounding of the dtype is all that may differ."""
    kernel = KERNELS["flash_cuda"]
    for mask, sizes in [
        (Mask(BlockShape([70, 30, 50], [-1, 0, 0])), (150, 150)),
        (Mask(BlockShape([33, 64, 5, 9], [-1, 0, 1, -1])), (111, 111)),
        (Mask(BlockShape([90], [-1])), (90, 700)),
        (Mask(BlockShape([90], [-1]), window=200), (90, 700)),
        (Mask(), (90, 700)),
        (Mask(), (1, 700)),
    ]:
        inputs = [x.cuda() for x in tensors(*sizes, dtype)]
        assert kernel.supports(*inputs[:3], SCORING)
        check(kernel, *inputs, mask, tolerance=2e-2)


@pytest.mark.gpu
def test_a_model_on_cuda_against_its_fp32_self():
    """Gradients in bf16 are as near to fp32 as dense ones are."""

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
