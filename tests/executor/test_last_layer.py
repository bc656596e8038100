"""The last layer on needed rows alone gives what the whole layer gives."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.executor.last_layer import decoder_layers
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.executor.test_parity import SPECIAL
from tests.models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    gradients,
    relative_error,
    tiny_model,
)

# Fp32 differs where a model has no fp64: a router's softmax, eager windows.
ALL = {
    **{(n, "plain"): {} for n in ARCHITECTURES},
    **{(n, "x"): SPECIAL[n] for n in SPECIAL},
}
FEW = 0.2


def masks_of(batch, share: float, seed: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.random(len(s) - 1) < share for s in batch]


def loss_at(masks):
    def sequence_loss(index, logprobs, entropy):
        mask = torch.from_numpy(masks[index])
        values = torch.where(mask, (0.7 * logprobs).exp() + 0.2 * entropy**2, 0.0)
        return values.sum() * (index + 1)

    return sequence_loss


def rows_of_last_mlp(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Tokens that enter the first and the last layer's MLP, call by call."""
    seen: list[tuple[int, int]] = []
    first: list[int] = []

    def tokens(args) -> int:
        return args[0].shape[-2]

    layers = decoder_layers(model)
    layers[0].mlp.register_forward_pre_hook(lambda m, a: first.append(tokens(a)))
    layers[-1].mlp.register_forward_pre_hook(
        lambda m, a: seen.append((first[-1], tokens(a)))
    )
    return seen


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_exact_for_every_architecture(name: str, kind: str) -> None:
    is_special = kind != "plain" or name == "qwen3_moe"
    dtype = torch.float32 if is_special else torch.float64
    tolerance = 1e-5 if is_special else 1e-10
    eager = (
        {"attn_implementation": "eager"} if kind == "x" and name != "mistral" else {}
    )
    model = tiny_model(name, dtype, **ALL[name, kind], **eager)
    batch = random_batch(np.random.default_rng(5), 10, 30, VOCAB_SIZE)
    masks = masks_of(batch, FEW)
    loss, tree = loss_at(masks), PrefixTree.from_sequences(batch)
    oracle.forward_backward(model, batch, loss)
    want = gradients(model)
    expected = oracle.sequence_outputs(model, batch)
    seen = rows_of_last_mlp(model)
    for budgets in [(7, 0), (32, 60), (512, None)]:
        executor = TreeExecutor(model, ExecutorConfig(*budgets))
        seen.clear()
        executor.forward_backward(tree, loss, masks)
        assert relative_error(gradients(model), want) <= tolerance
        # and it is not the whole layer that ran
        assert sum(last for _, last in seen) < 0.75 * sum(first for first, _ in seen)
        for mask, got, all_of in zip(
            masks, executor.forward(tree, masks), expected, strict=True
        ):
            at = torch.from_numpy(mask)
            if mask.any():
                assert (
                    relative_error(got.logprobs[at], all_of.logprobs[at]) <= tolerance
                )


def test_values_of_a_critic(value_model) -> None:
    batch = random_batch(np.random.default_rng(6), 8, 20, VOCAB_SIZE)
    rng = np.random.default_rng(7)
    masks = [rng.random(len(s)) < FEW for s in batch]
    tree = PrefixTree.from_sequences(batch)

    def loss(index, values):
        return torch.where(torch.from_numpy(masks[index]), values**2, 0.0).sum()

    for i, sequence in enumerate(batch):
        values = value_model(input_ids=torch.tensor([sequence])).logits[0, :, 0]
        loss(i, values).backward()
    want = gradients(value_model)
    seen = rows_of_last_mlp(value_model)
    executor = TreeExecutor(value_model, ExecutorConfig(16, 10), outputs="values")
    executor.forward_backward(tree, loss, masks)
    assert relative_error(gradients(value_model), want) <= 1e-10
    assert sum(last for _, last in seen) < 0.75 * sum(first for first, _ in seen)


def test_whole_layer_where_most_rows_are_needed() -> None:
    model = tiny_model("qwen3", torch.float64)
    executor = TreeExecutor(model)
    tree = PrefixTree.from_sequences([[3, 4, 5, 6, 7, 8, 9, 10]])
    executor.forward(tree)
    seen = rows_of_last_mlp(model)
    executor.forward(tree)
    assert seen == [(7, 7)]  # the last token predicts nothing


class _MixesTokens(nn.Module):
    """An MLP that is not a function of one token."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(x)
        return out * (1 + x.shape[1])


def test_whole_layer_where_rows_give_another_result() -> None:
    model = tiny_model("qwen3", torch.float64)
    layer = decoder_layers(model)[-1]
    layer.mlp = _MixesTokens(layer.mlp)
    seen = rows_of_last_mlp(model)
    batch = [[3, 4, 5, 6, 7, 8, 9, 10]]
    mask = [np.arange(7) == 6]
    executor = TreeExecutor(model)
    executor.forward(PrefixTree.from_sequences(batch), mask)
    seen.clear()
    executor.forward(PrefixTree.from_sequences(batch), mask)
    assert seen == [(7, 7)]


def test_the_layer_gets_its_forward_back() -> None:
    model = tiny_model("qwen3", torch.float64)
    executor = TreeExecutor(model)
    layer = decoder_layers(model)[-1]
    tree = PrefixTree.from_sequences([[3, 4, 5, 6, 7, 8, 9, 10]])
    mask = [np.arange(7) == 3]
    executor.forward(tree, mask)
    assert "forward" not in vars(layer)
    own = layer.forward
    layer.forward = own  # somebody's own, which stays
    executor.forward(tree, mask)
    assert vars(layer)["forward"] is own
