"""Kernels that a block starts per layer, beside those of dense training; no GPU needed.

Operators on fake CUDA tensors are counted, views and empty tensors aside. The backward
of flash attention starts six kernels.
"""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.executor.fused import LAUNCHES as FUSED_LAUNCHES
from areal_dta.executor.fused import FusedLayers
from areal_dta.executor.kernels.triton_ops import LAUNCHES as TREE_LAUNCHES
from areal_dta.executor.kernels.triton_ops import is_installed
from areal_dta.tree import PrefixTree
from tests.executor import fake_cuda as fake
from tests.executor.fake_cuda import fake_cuda, move
from tests.models import VOCAB_SIZE, tiny_model

SIZES = {"head_dim": 16, "hidden_size": 64}
LAUNCHES = TREE_LAUNCHES | FUSED_LAUNCHES
NO_KERNEL = ("empty", "detach", "alias", "_unsafe_view", "_reshape_alias", "sym_")


def launches(names) -> int:
    total = 0
    for name in names:
        namespace, op, overload = name.split(".")
        if namespace == "prim":  # asks a tensor for its device
            continue
        packet = getattr(getattr(torch.ops, namespace), op)
        if f"{namespace}::{op}" in LAUNCHES:
            total += LAUNCHES[f"{namespace}::{op}"]
        elif "flash_attention_backward" in op:
            total += 6
        elif not getattr(packet, overload).is_view and not any(
            word in op for word in NO_KERNEL
        ):
            total += 1
    return total


def flash(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Dense attention as flash attention computes it."""
    call = torch.ops.aten._scaled_dot_product_flash_attention
    out = call(query, key, value, 0.0, True, scale=scaling)[0]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("flash_for_count", flash)


def dense(num_layers: int, fused_layers: str) -> int:
    model = tiny_model("qwen3", torch.bfloat16, num_hidden_layers=num_layers, **SIZES)
    with fake_cuda() as calls:
        model = move(model)
        model.config._attn_implementation = "flash_for_count"
        fused = FusedLayers(model, fused_layers)
        tokens = torch.zeros(1, 60, dtype=torch.int64, device="cuda")
        at = torch.zeros(1, 60, dtype=torch.int64, device="cuda")
        calls.names.clear()
        with fused.active():
            hidden = model.model(tokens, position_ids=at, use_cache=False)
            hidden = hidden.last_hidden_state
            fake.backward([hidden], [torch.empty_like(hidden)])
        return launches(calls.names)


def tree(num_layers: int, fused_layers: str, batch, block_tokens: int) -> int:
    options = {"num_hidden_layers": num_layers, **SIZES}
    learned = TreeExecutor(tiny_model("qwen3", **options))
    learned.profile(find_randomness=False)
    model = tiny_model("qwen3", torch.bfloat16, **options)
    with fake_cuda() as calls:
        config = ExecutorConfig(block_tokens, kernel="triton_tree")
        executor = TreeExecutor(move(model), config)
        executor.layers = learned.layers
        executor.fused = FusedLayers(model, fused_layers)
        executor.profile = lambda find_randomness: None  # type: ignore[method-assign]
        calls.names.clear()
        executor.forward_backward(
            PrefixTree.from_sequences(batch), lambda i, x, _: -x.sum()
        )
        return launches(calls.names)


def per_layer(count, *args) -> int:
    return count(3, *args) - count(2, *args)


@pytest.mark.skipif(not is_installed(), reason="needs Triton")
@pytest.mark.parametrize(
    ("fused_layers", "least", "most"), [("off", 150, 180), ("on", 45, 60)]
)
def test_a_block_starts_hardly_more_kernels_than_dense_training(
    fused_layers, least, most
):
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, VOCAB_SIZE, 20).tolist()
    chain = [[*trunk, *range(30)]]
    branches = [[*trunk, a, 1, 2, 3, b, 4, 5] for a in (7, 8) for b in (9, 10)]
    baseline = per_layer(dense, fused_layers)
    assert least <= baseline <= most
    assert per_layer(tree, fused_layers, chain, 512) <= 1.05 * baseline
    assert per_layer(tree, fused_layers, branches, 512) <= 1.2 * baseline
