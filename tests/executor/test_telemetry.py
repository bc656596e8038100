"""Each call of the model leaves one sample, with the counts of the schedule."""

import numpy as np
import pytest

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.schedule import FORWARD, TRAINING, schedule_features
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.models import VOCAB_SIZE, tiny_model


@pytest.mark.parametrize("retain_tokens", [0, 20, None])
def test_one_sample_per_block(retain_tokens):
    model = tiny_model("qwen3")
    tree = PrefixTree.from_sequences(
        random_batch(np.random.default_rng(2), 12, 30, VOCAB_SIZE)
    )
    executor = TreeExecutor(model, ExecutorConfig(16, retain_tokens))
    executor.forward_backward(tree, lambda index, logprobs, entropy: logprobs.sum())
    assert executor.last_schedule is not None and executor.last_stats is not None
    planned = list(schedule_features(tree, executor.last_schedule))
    samples = executor.last_samples
    assert len(samples) == executor.last_stats.num_blocks > 3
    assert [(s.kind, s.features) for s in samples] == planned
    assert all(s.seconds > 0 for s in samples)
    trained = sum(s.features.num_grad_tokens for s in samples if s.kind == TRAINING)
    assert trained == executor.last_stats.num_computed_tokens
    without = sum(s.features.num_no_grad_tokens for s in samples)
    assert without == executor.last_stats.num_recomputed_tokens

    executor.forward(tree)
    assert {s.kind for s in executor.last_samples} == {FORWARD}
    executor.forward(PrefixTree.from_sequences([]))
    assert executor.last_samples == []


def test_the_batch_scope_leaves_the_samples_of_both_passes():
    tree = PrefixTree.from_sequences([[1, 2, 3, 4], [1, 2, 5]])
    executor = TreeExecutor(tiny_model("llama"))
    executor.forward_backward_groups(
        tree, lambda indices, logprobs, entropy: logprobs[0].sum(), scope="batch"
    )
    assert [s.kind for s in executor.last_samples] == [FORWARD, TRAINING]
