"""Losses over the whole batch, and models with values instead of logprobs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForTokenClassification

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.schedule import NeededOutputs
from areal_dta.tree import PrefixTree
from tests.builders import batches, random_batch
from tests.models import (
    VOCAB_SIZE,
    gradients,
    relative_error,
    tiny_model,
)

BUDGETS = [(3, 0), (16, 24), (512, None)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", torch.float64)


def dense_batch(model, batch, batch_loss) -> float:
    """The oracle: all sequences' graphs alive at once, one loss."""
    outputs = [oracle.sequence_output(model, s) for s in batch]
    loss = batch_loss(
        list(range(len(batch))),
        [o.logprobs for o in outputs],
        [o.entropy for o in outputs],
    )
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach())


def preference_loss(indices, logprobs, entropies):
    """DPO's form: pairs of sequences under one non-linear function."""
    totals = [lp.sum() for lp in logprobs]
    pairs = zip(totals[::2], totals[1::2], strict=False)
    margins = [0.1 * (chosen - rejected) for chosen, rejected in pairs]
    return -torch.nn.functional.logsigmoid(torch.stack(margins)).mean()


def truncated_loss(indices, logprobs, entropies):
    """A mask that depends on all tokens of the batch, as M2PO's does."""
    flat, spread = torch.cat(logprobs), torch.cat(entropies)
    keep = flat.detach() >= flat.detach().median()
    return (flat.exp() * keep).sum() / keep.sum() + spread.std()


@pytest.mark.parametrize("loss", [preference_loss, truncated_loss])
@pytest.mark.parametrize("budgets", BUDGETS)
def test_batch_scope_is_exact_for_any_loss(model, loss, budgets):
    batch = random_batch(np.random.default_rng(1), 10, 20, VOCAB_SIZE)
    batch = [s for s in batch if len(s) > 1]
    want_loss = dense_batch(model, batch, loss)
    want = gradients(model)
    calls = []

    def counted(indices, logprobs, entropies):
        calls.append(indices)
        return loss(indices, logprobs, entropies)

    executor = TreeExecutor(model, ExecutorConfig(*budgets))
    tree = PrefixTree.from_sequences(batch)
    got = executor.forward_backward_groups(tree, counted, scope="batch")
    assert abs(got - want_loss) <= 1e-10 * max(1.0, abs(want_loss))
    assert relative_error(gradients(model), want) <= 1e-10
    assert calls == [list(range(len(batch)))]


def test_sequence_scope_would_be_wrong_for_such_a_loss(model):
    batch = random_batch(np.random.default_rng(1), 10, 20, VOCAB_SIZE)
    batch = [s for s in batch if len(s) > 1]
    dense_batch(model, batch, truncated_loss)
    want = gradients(model)
    tree = PrefixTree.from_sequences(batch)
    executor = TreeExecutor(model, ExecutorConfig(block_tokens=8))
    executor.forward_backward_groups(tree, truncated_loss)
    assert relative_error(gradients(model), want) > 1e-3


def test_batch_scope_with_positions_and_of_nothing(model):
    batch = [[3, 4, 5, 6, 7], [3, 4, 8, 9, 2]]
    masks = [np.array([False, True, True, False])] * 2
    loss_masks = [torch.from_numpy(m) for m in masks]

    def loss(indices, logprobs, entropies):
        picked = [lp[m] for lp, m in zip(logprobs, loss_masks, strict=True)]
        return torch.cat(picked).square().sum().sqrt()

    dense_batch(model, batch, loss)
    want = gradients(model)
    executor = TreeExecutor(model, ExecutorConfig(block_tokens=2, retain_tokens=0))
    tree = PrefixTree.from_sequences(batch)
    executor.forward_backward_groups(tree, loss, masks, scope="batch")
    assert relative_error(gradients(model), want) <= 1e-10
    assert executor.last_stats.num_rows == 3  # the fork's row once, two below it
    empty = executor.forward_backward_groups(PrefixTree(), loss, scope="batch")
    assert empty == 0.0
    with pytest.raises(ValueError, match="scope='group'"):
        executor.forward_backward_groups(tree, loss, masks, scope="group")


def value_loss(batch):
    def loss(index, values):
        target = torch.arange(len(batch[index]), dtype=values.dtype) / 7
        return ((values - target) ** 2).sum() * (index + 1)

    return loss


def dense_values(model, batch, loss) -> float:
    total = 0.0
    for i, sequence in enumerate(batch):
        value = loss(i, oracle.value_output(model, sequence).values)
        value.backward()
        total += float(value.detach())
    return total


@settings(max_examples=30, deadline=None)
@given(
    batch=batches(8, 10, 4),
    block_tokens=st.integers(1, 30),
    retain_tokens=st.one_of(st.none(), st.integers(0, 30)),
)
def test_values_of_a_critic(value_model, batch, block_tokens, retain_tokens):
    loss = value_loss(batch)
    config = ExecutorConfig(block_tokens, retain_tokens)
    executor = TreeExecutor(value_model, config, outputs="values")
    tree = PrefixTree.from_sequences(batch)
    want_loss = dense_values(value_model, batch, loss)
    want = gradients(value_model)
    got_loss = executor.forward_backward(tree, loss)
    assert relative_error(gradients(value_model), want) <= 1e-10
    assert abs(got_loss - want_loss) <= 1e-10 * max(1.0, abs(want_loss))
    for sequence, got in zip(batch, executor.forward(tree), strict=True):
        expected = oracle.value_output(value_model, sequence).values
        assert got.values.shape == expected.shape == (len(sequence),)
        assert relative_error(got.values, expected) <= 1e-10


def test_scores_at_the_last_token_of_pairs(value_model):
    """A reward model: only last positions are read, and pairs meet in one loss."""
    batch = [[3, 4, 5, 6], [3, 4, 5, 7, 8], [3, 4], [3, 4, 5]]
    masks = [np.arange(len(s)) == len(s) - 1 for s in batch]

    def loss(indices, values):
        last = torch.stack([v[-1] for v in values])
        return -torch.nn.functional.logsigmoid(last[::2] - last[1::2]).sum()

    outputs = [oracle.value_output(value_model, s).values for s in batch]
    loss(None, outputs).backward()
    want = gradients(value_model)
    config = ExecutorConfig(block_tokens=2, retain_tokens=0)
    executor = TreeExecutor(value_model, config, outputs="values")
    tree = PrefixTree.from_sequences(batch)
    executor.forward_backward_groups(tree, loss, masks, scope="batch")
    assert relative_error(gradients(value_model), want) <= 1e-10
    assert executor.last_stats.num_rows == 4
    with pytest.raises(
        ValueError, match=r"gradient at skipped.* \[0\] of sequence 0 \(values"
    ):
        executor.forward_backward(tree, lambda i, v: v.sum(), masks)
    gradients(value_model)
    with pytest.raises(ValueError, match=r"expected \(4,\)"):
        executor.forward(tree, [m[1:] for m in masks])


def test_a_model_with_several_labels_is_refused(value_model):
    config = tiny_model("qwen3").config
    config.num_labels, config.classifier_dropout = 2, 0.0
    model = AutoModelForTokenClassification.from_config(config)
    with pytest.raises(ValueError, match="num_labels=1"):
        TreeExecutor(model, outputs="values").forward(PrefixTree.from_sequences([[3]]))
    with pytest.raises(ValueError, match="outputs='value'"):
        TreeExecutor(model, outputs="value")


def test_needed_values_have_no_edges():
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2]])
    everywhere = NeededOutputs.values_at(tree, None)
    assert everywhere.num_outputs == everywhere.num_computed_tokens == 3
    assert not everywhere.edge_T.any() and everywhere.is_all
    last = NeededOutputs.values_at(tree, [np.zeros(3, bool), np.array([False, True])])
    assert last.num_outputs == 1 and last.num_computed_tokens == 2
