"""Only needed outputs are computed, and they equal the oracle's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.executor import (
    ExecutorConfig,
    TreeExecutor,
    fused_logprobs,
    oracle,
)
from areal_dta.tree import PrefixTree
from tests.builders import batches, random_batch
from tests.models import VOCAB_SIZE, gradients, relative_error, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3-tied", torch.float64)


def random_masks(batch, share: float, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.random(len(s) - 1) < share for s in batch]


def masked_loss(masks):
    def sequence_loss(index, logprobs, entropy):
        mask = torch.from_numpy(masks[index])
        values = torch.where(mask, (0.7 * logprobs).exp() + 0.2 * entropy**2, 0.0)
        return values.sum() * (index + 1)

    return sequence_loss


@settings(max_examples=40, deadline=None)
@given(
    batch=batches(8, 10, 4),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    block_tokens=st.integers(1, 30),
    retain_tokens=st.one_of(st.none(), st.integers(0, 30)),
    chunk=st.sampled_from([1, 3 * VOCAB_SIZE, 2**25]),
    seed=st.integers(0, 99),
)
def test_gradients_and_values_of_needed_outputs(
    model, batch, share, block_tokens, retain_tokens, chunk, seed
):
    masks = random_masks(batch, share, seed)
    tree, loss = PrefixTree.from_sequences(batch), masked_loss(masks)
    config = ExecutorConfig(
        block_tokens, retain_tokens, temperature=0.8, logit_chunk_elements=chunk
    )
    executor = TreeExecutor(model, config)
    want_loss = oracle.forward_backward(model, batch, loss, 0.8)
    want = gradients(model)
    got_loss = executor.forward_backward(tree, loss, masks)
    assert relative_error(gradients(model), want) <= 1e-10
    assert abs(got_loss - want_loss) <= 1e-10 * max(1.0, abs(want_loss))

    expected = oracle.sequence_outputs(model, batch, 0.8)
    for i, got in enumerate(executor.forward(tree, masks)):
        mask = torch.from_numpy(masks[i])
        assert relative_error(got.logprobs[mask], expected[i].logprobs[mask]) <= 1e-10
        assert relative_error(got.entropy[mask], expected[i].entropy[mask]) <= 1e-10


def test_few_needed_outputs_compute_few_tokens_and_rows(model):
    prompt = list(range(3, 33))
    batch = [[*prompt, a, 5, 6, *range(3, 23)] for a in (1, 2, 3)]
    masks = [np.zeros(len(s) - 1, dtype=bool) for s in batch]
    for mask in masks:
        mask[29:32] = True  # the three tokens after the prompt
    executor = TreeExecutor(model)
    executor.forward_backward(
        PrefixTree.from_sequences(batch), masked_loss(masks), masks
    )
    gradients(model)
    stats = executor.last_stats
    assert stats is not None
    assert stats.num_computed_tokens == stats.num_forward_tokens == 30 + 3 * 2
    assert stats.num_rows == 1 + 3 * 2


def test_a_gradient_at_a_skipped_position_raises(model):
    batch = [[3, 4, 5, 6], [3, 4, 7, 8]]
    masks = [np.array([False, True, False])] * 2
    executor = TreeExecutor(model)
    tree = PrefixTree.from_sequences(batch)
    with pytest.raises(ValueError, match=r"skipped.* \[0, 2\] of sequence 0"):
        executor.forward_backward(tree, lambda i, lp, h: lp.sum(), masks)
    with pytest.raises(ValueError, match="positions"):
        nothing = [np.zeros(3, dtype=bool)] * 2
        executor.forward_backward(tree, lambda i, lp, h: h.sum(), nothing)
    gradients(model)


def test_a_position_that_another_sequence_reads_may_be_used(model):
    """Both share the edge 3 -> 4, so its value is there for either."""
    batch = [[3, 4, 5], [3, 4, 6]]
    masks = [np.array([True, False]), np.array([False, True])]
    executor = TreeExecutor(model)
    got = executor.forward(PrefixTree.from_sequences(batch), masks)
    assert got[1].logprobs[0] == got[0].logprobs[0] != 0


@pytest.mark.parametrize("chunk", [1, 100, 2**25])
def test_at_most_a_chunk_of_logits_is_held(chunk, monkeypatch):
    sizes = []
    project = fused_logprobs._project

    def recorded(hidden, weight, bias):
        logits = project(hidden, weight, bias)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(fused_logprobs, "_project", recorded)
    model = tiny_model("qwen3")
    config = ExecutorConfig(block_tokens=32, logit_chunk_elements=chunk)
    batch = random_batch(np.random.default_rng(1), 8, 20, VOCAB_SIZE)
    TreeExecutor(model, config).forward_backward(
        PrefixTree.from_sequences(batch), lambda i, lp, h: lp.sum()
    )
    assert sizes and max(sizes) <= max(chunk, VOCAB_SIZE)


def test_a_model_that_scales_its_logits_keeps_its_own_projection():
    model = tiny_model("granite", torch.float64, logits_scaling=3.0)
    batch = random_batch(np.random.default_rng(2), 8, 20, VOCAB_SIZE)
    masks = random_masks(batch, 0.5, 3)
    loss = masked_loss(masks)
    oracle.forward_backward(model, batch, loss)
    want = gradients(model)
    TreeExecutor(model, ExecutorConfig(block_tokens=8)).forward_backward(
        PrefixTree.from_sequences(batch), loss, masks
    )
    assert relative_error(gradients(model), want) <= 1e-10


def test_the_head_is_given_back(model):
    TreeExecutor(model).forward(PrefixTree.from_sequences([[3, 4, 5]]))
    assert "forward" not in vars(model.lm_head)
