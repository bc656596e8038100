"""The routers' auxiliary loss of a tree is that of its sequences, one at a time.

Held against Transformers' own ``aux_loss``, in fp64 with all of its casts lifted.
"""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.executor.oracle import sequence_output
from areal_dta.executor.routers import find_routers
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.models import VOCAB_SIZE, gradients, relative_error, tiny_model

MODELS = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
BUDGETS = [(3, 0), (5, 7), (8, 20), (512, None)]


class Fp64(TorchFunctionMode):
    """Casts to fp32 become casts to fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def build(name, dtype=torch.float64):
    eager = {"attn_implementation": "eager"} if name == "gpt_oss" else {}
    sizes = MODELS[name] | {"experts_implementation": "eager"}
    return tiny_model(name, dtype, **sizes, **eager)


def one_by_one(model, batch, weights, loss_weights):
    """Add each sequence's own losses, and their gradients."""
    total = 0.0
    for sequence, weight, loss_weight in zip(batch, weights, loss_weights, strict=True):
        token_S = torch.tensor(sequence)[None]
        output = model(input_ids=token_S, output_router_logits=True, use_cache=False)
        loss = weight * output.aux_loss
        if len(sequence) > 1:
            loss = loss + loss_weight * sequence_output(model, sequence).logprobs.sum()
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.parametrize(
    "name, scope", [*((name, "sequence") for name in MODELS), ("mixtral", "batch")]
)
def test_loss_and_gradients_are_those_of_separate_sequences(name, scope):
    generator = np.random.default_rng(5)
    model = build(name)
    batch = random_batch(generator, 9, 22, VOCAB_SIZE)
    batch += [batch[0], batch[0][: len(batch[0]) // 2 + 1], batch[1][:1]]
    weights = generator.uniform(0.5, 2.0, len(batch)).tolist()
    loss_weights = generator.uniform(-1.0, 1.0, len(batch)).tolist()
    with Fp64():
        expected_loss = one_by_one(model, batch, weights, loss_weights)
        expected = gradients(model)
        tree = PrefixTree.from_sequences(batch)
        for block_tokens, retain_tokens in BUDGETS:
            config = ExecutorConfig(block_tokens, retain_tokens, router_load=True)
            executor = TreeExecutor(model, config)

            def loss(indices, logprobs, entropies):
                terms = [
                    loss_weights[i] * x.sum()
                    for i, x in zip(indices, logprobs, strict=True)
                ]
                return torch.stack(terms).sum()

            got = executor.forward_backward_groups(
                tree, loss, scope=scope, router_weights=weights
            )
            assert got == pytest.approx(expected_loss, rel=1e-10)
            assert relative_error(gradients(model), expected) < 1e-10
            assert executor.last_stats.router_loss > 0
            assert executor.last_stats.expert_load


def test_tokens_without_needed_outputs_take_part():
    model = build("qwen3_moe")
    batch = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9], [1, 2]]
    weights = [1.0, 0.5, 0.25]
    positions = [np.zeros(len(s) - 1, bool) for s in batch]
    with Fp64():
        expected_loss = one_by_one(model, batch, weights, [0.0] * 3)
        expected = gradients(model)
        executor = TreeExecutor(model, ExecutorConfig(4, 0))
        got = executor.forward_backward_groups(
            PrefixTree.from_sequences(batch),
            lambda indices, logprobs, entropies: torch.zeros(()),
            positions,
            router_weights=weights,
        )
    assert got == pytest.approx(expected_loss, rel=1e-10)
    assert relative_error(gradients(model), expected) < 1e-10


def test_in_fp32_no_further_from_fp64_than_one_at_a_time():
    batch = random_batch(np.random.default_rng(8), 10, 24, VOCAB_SIZE)
    weights = [1.0] * len(batch)
    exact = build("mixtral")
    with Fp64():
        one_by_one(exact, batch, weights, [0.0] * len(batch))
        expected = gradients(exact)
    model = build("mixtral", torch.float32)
    one_by_one(model, batch, weights, [0.0] * len(batch))
    dense = relative_error(gradients(model), expected)
    TreeExecutor(model, ExecutorConfig(7, 0)).forward_backward_groups(
        PrefixTree.from_sequences(batch),
        lambda indices, logprobs, entropies: torch.zeros(()),
        router_weights=weights,
    )
    assert relative_error(gradients(model), expected) < 1.5 * dense


@pytest.mark.parametrize(
    "name, sizes", [("qwen3", {}), ("jetmoe", {"num_hidden_layers": 2})]
)
def test_models_with_no_such_loss_are_refused(name, sizes):
    model = tiny_model(name, **sizes)
    with pytest.raises(ValueError, match=r"router_aux_loss: .* set actor\.dta\.router"):
        find_routers(model)
