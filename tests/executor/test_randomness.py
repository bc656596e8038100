"""Draws in training, however rare, and counters are refused; harmless draws are not."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from areal_dta.executor import TreeExecutor, UnsupportedModelError
from areal_dta.tree import PrefixTree
from tests.models import tiny_model

TREE = PrefixTree.from_sequences([[3, 4, 5, 6], [3, 4, 7]])


def hooked(change):
    """A model whose second MLP gives ``change(output)`` in training."""
    model = tiny_model("qwen3")
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: change(output) if module.training else None
    )
    return model


def train(model):
    TreeExecutor(model).forward_backward(TREE, lambda i, logprobs, entropy: logprobs[0])


@pytest.mark.parametrize("change", [
    lambda x: x * (1 + 0.01 * torch.rand(1)),
    lambda x: x + 0.01 * torch.randn_like(x),
    lambda x: x + torch.empty_like(x).uniform_(-0.01, 0.01),
    lambda x: x * 0 if torch.rand(()) < 1e-6 else x,
    lambda x: x * 0 if torch.rand(()) > 1 - 1e-6 else x,
    lambda x: x * torch.bernoulli(torch.full((1,), 1 - 1e-6)),
    lambda x: nn.functional.dropout(x, 1e-6),
    lambda x: nn.functional.alpha_dropout(x, 1e-6, training=True),
    lambda x: x * 0 if torch.rand((), generator=torch.Generator()) < 1e-6
    else x * torch.rand(()).sign(),
])  # fmt: skip
def test_draws_however_rare(change):
    model = hooked(change)
    state = torch.random.get_rng_state()
    with pytest.raises(UnsupportedModelError, match=r"layers\.1.*random numbers"):
        train(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    train(model.eval())


@pytest.mark.parametrize("change", [
    lambda x: x * 0 if torch.rand(()) < 0.0 else x,
    lambda x: x * torch.bernoulli(torch.ones(1)),
    lambda x: nn.functional.dropout(x, 0.0),
])  # fmt: skip
def test_draws_without_an_effect(change):
    train(hooked(change))


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_from_python_and_numpy(draw):
    with pytest.raises(UnsupportedModelError, match="from Python or NumPy"):
        train(hooked(lambda x: x * 0 if draw() < 1e-6 else x))


def test_a_buffer_that_counts_calls():
    model = tiny_model("qwen3")
    model.register_buffer("count", torch.zeros(()))

    def count(module, args):
        model.count += 1

    model.model.layers[0].register_forward_pre_hook(count)
    with pytest.raises(UnsupportedModelError, match="count is written in every call"):
        train(model)
