"""The expert load of a tree equals that of its sequences, one at a time."""

import numpy as np
import pytest
import torch

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.schedule import NeededOutputs
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.models import VOCAB_SIZE, gradients, tiny_model

MODELS = {
    "qwen3_moe": {"num_experts": 6},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
}


def build(name):
    eager = {"attn_implementation": "eager"} if name == "gpt_oss" else {}
    return tiny_model(name, **MODELS[name], **eager)


def loads_one_by_one(model, batch, tree, is_computed_T):
    """Loads of the computed tokens of each sequence, from the routers' own output."""
    chosen: list[torch.Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    handles = [
        r.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        for r in routers
    ]
    totals = [np.zeros(r.num_experts, np.int64) for r in routers]
    for index, sequence in enumerate(batch):
        chosen.clear()
        with torch.no_grad():
            model(input_ids=torch.tensor([sequence]), use_cache=False)
        mask = is_computed_T[tree.token_indices(index)]
        for total, choice in zip(totals, chosen, strict=True):
            experts = choice.numpy()[mask].flatten()
            total += np.bincount(experts, minlength=len(total))
    for handle in handles:
        handle.remove()
    return tuple(tuple(total.tolist()) for total in totals)


def computed_tokens(tree, needed):
    parts = [
        np.arange(node.num_tokens) < num_tokens
        for node, num_tokens in zip(tree.nodes, needed.computed, strict=True)
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budgets", [(6, 0), (9, 20), (512, None)])
def test_counts_are_those_of_separate_sequences(name, budgets):
    model = build(name)
    batch = random_batch(np.random.default_rng(4), 12, 24, VOCAB_SIZE)
    tree = PrefixTree.from_sequences(batch)
    executor = TreeExecutor(model, ExecutorConfig(*budgets, router_load=True))
    mask = computed_tokens(tree, NeededOutputs.all(tree))
    expected = loads_one_by_one(model, batch, tree, mask)
    num_choices = model.config.num_experts_per_tok * int(
        sum(mask[tree.token_indices(i)].sum() for i in range(len(batch)))
    )
    assert all(sum(layer) == num_choices for layer in expected)

    executor.forward(tree)
    assert executor.last_stats.expert_load == expected
    executor.forward_backward(tree, lambda i, lp, h: lp.sum())
    assert executor.last_stats.expert_load == expected
    gradients(model)


def test_only_what_is_computed_counts():
    model = build("qwen3_moe")
    batch = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9], [1, 2]]
    tree = PrefixTree.from_sequences(batch)
    positions = [np.zeros(len(s) - 1, bool) for s in batch]
    positions[0][3] = True  # token 4 of the first, predicted at depth 3
    executor = TreeExecutor(model, ExecutorConfig(4, 0, router_load=True))
    executor.forward_backward(
        tree, lambda i, lp, h: lp[3] if i == 0 else lp.sum() * 0, positions
    )
    mask = computed_tokens(tree, NeededOutputs.logprobs_at(tree, positions))
    expected = loads_one_by_one(model, batch, tree, mask)
    assert executor.last_stats.expert_load == expected
    # three sequences are part of tokens 1 and 2, two of 3, one of 4
    assert sum(expected[0]) == model.config.num_experts_per_tok * (3 + 3 + 2 + 1)


def test_without_being_asked_nothing_is_counted():
    model = build("qwen3_moe")
    executor = TreeExecutor(model)
    executor.forward(PrefixTree.from_sequences([[1, 2, 3]]))
    assert executor.last_stats.expert_load == ()
    assert not any(m._forward_hooks for m in model.modules())


def test_a_model_without_experts_is_refused():
    executor = TreeExecutor(tiny_model("qwen3"), ExecutorConfig(router_load=True))
    with pytest.raises(ValueError, match="no router .* expected a mixture"):
        executor.forward(PrefixTree.from_sequences([[1, 2, 3]]))
