"""Multimodal checkpoints on text alone equal one sequence at a time."""

import numpy as np
import pytest
import torch

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.executor.checks.multimodal import freeze_other_parts, text_modules
from areal_dta.executor.checks.self_check import check_on_tiny_tree
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.models import (
    MULTIMODAL,
    VOCAB_SIZE,
    gradients,
    relative_error,
    tiny_multimodal,
)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_gradients_are_those_of_separate_sequences(name):
    model = tiny_multimodal(name, torch.float64)
    assert freeze_other_parts(model) > 0
    rng = np.random.default_rng(2)
    batch = random_batch(rng, 8, 20, VOCAB_SIZE - 4)  # no tokens that stand for images
    weights = [torch.from_numpy(rng.uniform(-1, 1, len(s) - 1)) for s in batch]

    def loss(i, logprobs, entropy):
        return (logprobs * weights[i]).sum() + 0.1 * entropy.sum()

    oracle.forward_backward(model, batch, loss)
    expected = gradients(model)
    for budgets in ((3, 0), (64, None)):
        executor = TreeExecutor(model, ExecutorConfig(*budgets))
        executor.forward_backward(PrefixTree.from_sequences(batch), loss)
        assert relative_error(gradients(model), expected) < 1e-10
    check_on_tiny_tree(executor)


def test_only_text_is_trained():
    model = tiny_multimodal("mistral3")
    trained = {id(p) for m in text_modules(model).values() for p in m.parameters()}
    num_frozen = freeze_other_parts(model)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert num_frozen == sum(model.get_parameter(n).numel() for n in frozen)
    assert all("vision" in n or "projector" in n for n in frozen)
    assert all(p.requires_grad == (id(p) in trained) for p in model.parameters())
