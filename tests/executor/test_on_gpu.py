"""The CUDA path on a card: every kernel, head size and group, long paths, models.

`bash scripts/gpu_acceptance.sh` runs these first. Rounding to the dtype is all that may
differ: kernels are compared with masked softmax in fp64, models with their fp32 selves,
beside what dense training in the same dtype differs by.
"""

import warnings

import numpy as np
import pytest
import torch

from areal_dta.doctor.parity import kernel_error
from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.executor.checks.self_check import check_on_tiny_tree
from areal_dta.executor.kernels import KERNELS, Mask, Scoring, Term
from areal_dta.executor.layout.block_layout import BlockShape
from areal_dta.tree import PrefixTree
from tests.models import VOCAB_SIZE, gradients, relative_error, tiny_model

pytestmark = pytest.mark.gpu

TRUTH = KERNELS["masked_softmax"]
HALF_KERNELS = [name for name in KERNELS if name != "flash_cpu"]
BRANCHES = BlockShape([70, 30, 50, 5, 64, 1], [-1, 0, 0, 1, -1, 4])
CHAIN = BlockShape([90], [-1])
ONE = BlockShape([1], [-1])
HEADS = {
    "64": (8, 8, 64),
    "128": (8, 8, 128),
    "256": (4, 4, 256),
    "gqa4": (8, 2, 128),
    "gqa8": (8, 1, 128),
    "gqa8-64": (16, 2, 64),
}
# A mask, the number of queries, the number of keys, and whether path and block are one.
CASES = {
    "branches": (lambda: Mask(BRANCHES), 220, 220, False),
    "chain": (lambda: Mask(CHAIN), 90, 90, False),
    "chain behind a path": (lambda: Mask(CHAIN), 90, 700, True),
    "chain in a window": (lambda: Mask(CHAIN, window=200), 90, 700, True),
    "path": (Mask, 90, 700, False),
    "one query": (Mask, 1, 700, False),
    "one query behind a long path": (
        lambda: Mask(ONE),
        1,
        5000,
        True,
    ),
    "long path": (Mask, 300, 6000, False),
    "chain behind a long path": (lambda: Mask(CHAIN), 90, 9000, True),
}


def tensors(heads, num_queries, num_keys, dtype):
    """Return q, k, v and the gradient of the output, as a model lays them out."""
    generator = torch.Generator().manual_seed(num_queries + num_keys)
    num_heads, num_kv_heads, width = heads
    shapes = [(num_heads, num_queries), *[(num_kv_heads, num_keys)] * 2]
    shapes.append((num_heads, num_queries))
    return [
        torch.randn(1, length, count, width, generator=generator)
        .to("cuda", dtype)
        .transpose(1, 2)
        for count, length in shapes
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", HALF_KERNELS)
def test_a_kernel_in_half_precision(name, heads, case, dtype):
    kernel, sizes = KERNELS[name], HEADS[heads]
    make_mask, num_queries, num_keys, is_joined = CASES[case]
    q, k, v, grad_out = tensors(sizes, num_queries, num_keys, dtype)
    scoring = Scoring(sizes[2] ** -0.5)
    if is_joined and not (kernel.joins_chains or kernel.takes_path):
        pytest.skip("the kernel takes path and block apart")
    if kernel.takes_path and make_mask().shape is None:
        pytest.skip("the kernel takes a path with a block only")
    if not kernel.supports(q, k, v, scoring):
        pytest.skip("not for these tensors")
    error = kernel_error(kernel, (q, k, v, grad_out), make_mask(), scoring)
    assert error <= (2e-2 if dtype == torch.bfloat16 else 4e-3)


def test_masked_softmax_in_fp32():
    """No TF32 behind our back."""
    q, k, v, grad_out = tensors((4, 2, 64), 220, 220, torch.float32)
    scoring = Scoring(0.125)
    exact = Term(k.double(), v.double(), Mask(BRANCHES), scoring)
    want = TRUTH.forward(q.double(), exact)
    got = TRUTH.forward(q, Term(k, v, Mask(BRANCHES), scoring))
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b).norm() / b.norm()) <= 1e-5


MODELS = {
    "llama": {},
    "llama-gqa4": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-tied": {},
    "qwen3_moe": {},
    "mistral": {"sliding_window": 64},
}
SIZES = {
    "head_dim": 64,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": 16384,
}


def batch(trunk: int, branch: int, leaf: int) -> list[list[int]]:
    """Sequences that branch at two depths, with a prefix and a duplicate."""
    rng = np.random.default_rng(5)

    def some(count: int) -> list[int]:
        return rng.integers(0, VOCAB_SIZE, count).tolist()

    first = some(trunk)
    sequences = []
    for _ in range(2):
        second = [*first, *some(branch)]
        sequences += [[*second, *some(n)] for n in (leaf, leaf // 3, 1)]
    return [*sequences, first, sequences[0], some(7)]


def loss(index, logprobs, entropy):
    return -logprobs.sum() + 0.1 * entropy.sum()


def errors(name, sequences, budgets, kernel="auto"):
    """Return the errors of dense and of tree gradients in bf16, against fp32."""
    exact = tiny_model(name, **SIZES, **MODELS.get(name, {})).cuda()
    oracle.forward_backward(exact, sequences, loss)
    want = gradients(exact)
    half = exact.to(torch.bfloat16)
    oracle.forward_backward(half, sequences, loss)
    dense = relative_error(gradients(half), want)
    config = ExecutorConfig(*budgets, kernel=kernel)
    executor = TreeExecutor(half, config)
    executor.forward_backward(PrefixTree.from_sequences(sequences), loss)
    return dense, relative_error(gradients(half), want)


@pytest.mark.parametrize("budgets", [(64, 0), (512, None), (4096, None)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_in_bf16(name, budgets):
    dense, tree = errors(name, batch(300, 120, 90), budgets)
    # A router takes nearly equal experts the other way after a rounding.
    assert tree <= (2.0 if name == "qwen3_moe" else 1.5) * dense, (tree, dense)


@pytest.mark.parametrize("name", ["qwen3", "llama-gqa4"])
@pytest.mark.parametrize("budgets", [(1024, 0), (4096, None)], ids=str)
def test_paths_beyond_4096_tokens(name, budgets):
    dense, tree = errors(name, batch(4500, 700, 500), budgets)
    assert tree <= 1.5 * dense, (tree, dense)


@pytest.mark.parametrize("kernel", [n for n in HALF_KERNELS if n != "masked_softmax"])
def test_a_model_by_each_kernel(kernel):
    dense, tree = errors("qwen3", batch(300, 120, 90), (512, None), kernel)
    assert tree <= 1.5 * dense, (tree, dense)


def test_the_self_check_passes_in_bf16():
    for name in ("qwen3", "mistral"):
        model = tiny_model(name, torch.bfloat16, **SIZES, **MODELS[name]).cuda()
        check_on_tiny_tree(TreeExecutor(model))


def test_fp32_on_a_gpu_is_exact():
    """Masked softmax serves it."""
    model = tiny_model("qwen3", **SIZES).cuda().double()
    sequences = batch(300, 120, 90)
    oracle.forward_backward(model, sequences, loss)
    want = gradients(model)
    model.float()
    oracle.forward_backward(model, sequences, loss)
    dense = relative_error(gradients(model), want)
    executor = TreeExecutor(model, ExecutorConfig(128, 0))
    executor.forward_backward(PrefixTree.from_sequences(sequences), loss)
    assert relative_error(gradients(model), want) <= max(1.5 * dense, 1e-6)


def test_nothing_waits_inside_a_traversal():
    """PyTorch itself counts here: a synchronising call raises."""
    model = tiny_model("qwen3", torch.bfloat16, **SIZES).cuda()
    executor = TreeExecutor(model, ExecutorConfig(256, None))
    tree = PrefixTree.from_sequences(batch(300, 120, 90))
    executor.forward_backward(tree, loss)  # the first call learns what layers ask for
    # The loss of the whole tree is read once at its end, by `tolist`; events may wait.
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            executor.forward_backward(tree, loss)
        found = [w for w in caught if "synchronizing" in str(w.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(found) <= 2, [str(w.message) for w in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_layers(dtype):
    """As near to fp64 as the model's own layers, on a tree of two blocks and more."""
    sizes = {"hidden_size": 256, "intermediate_size": 700, "head_dim": 64}
    batch = [[*range(30), *tail] for tail in ([1, 2, 3], [4, 5], [1, 2, 9, 9])]
    tree = PrefixTree.from_sequences(batch)
    truth = tiny_model("qwen3", torch.float64, **sizes)
    exact = TreeExecutor(truth, ExecutorConfig(16, fused_layers="off"))
    exact.forward_backward(tree, lambda i, x, _: -x.sum())
    want, errors = gradients(truth), {}
    for choice in ("off", "on"):
        model = tiny_model("qwen3", dtype, **sizes).cuda()
        executor = TreeExecutor(model, ExecutorConfig(16, fused_layers=choice))
        executor.forward_backward(tree, lambda i, x, _: -x.sum())
        errors[choice] = relative_error(gradients(model).cpu(), want)
    assert executor.fused is not None
    assert executor.fused.replaced["Qwen3MLP"] == 2 and not executor.fused.left
    assert errors["on"] <= 1.5 * errors["off"]
