"""On a GPU a traversal copies its indices once and waits for nothing until its end."""

import numpy as np
import pytest
import torch

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.tree import PrefixTree
from tests.executor.fake_cuda import fake_cuda, move
from tests.executor.test_parity import SPECIAL
from tests.models import VOCAB_SIZE, tiny_model

MODELS = {
    "llama": {},
    "llama-gqa4": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-tied": {},
    "mistral": {"sliding_window": 8},
}


def tree_of_agents() -> PrefixTree:
    """Branches at several depths, so that blocks have levels, paths and chains."""
    rng = np.random.default_rng(0)
    sequences = []
    first = rng.integers(0, VOCAB_SIZE, 40).tolist()
    for a in range(3):
        second = [*first, a, *rng.integers(0, VOCAB_SIZE, 25).tolist()]
        for b in range(3):
            third = [*second, b, *rng.integers(0, VOCAB_SIZE, 10).tolist()]
            sequences += [[*third, c, 1, 2, 3] for c in range(2)]
    return PrefixTree.from_sequences(sequences)


def loss(index, logprobs, entropy):
    return -logprobs.sum() + 0.1 * entropy.sum()


SLOWLY = {"gemma3_text": SPECIAL["gemma3_text"], "olmo2": {}, "qwen3_moe": {}}


@pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOWLY)]
)
@pytest.mark.parametrize("budgets", [(24, 0), (64, None)], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_traversal_copies_once_and_reads_at_its_end(name, budgets, share):
    tree = tree_of_agents()
    # What the layers ask of attention is learned by reading values, once per model.
    learned = TreeExecutor(tiny_model(name, **(MODELS | SLOWLY)[name]))
    learned.profile(find_randomness=False)
    rng = np.random.default_rng(1)
    lengths = map(tree.sequence_length, range(tree.num_sequences))
    masks = [rng.random(n - 1) < share for n in lengths]
    model = tiny_model(name, torch.bfloat16, **(MODELS | SLOWLY)[name])
    with fake_cuda() as calls:
        model = move(model)
        executor = TreeExecutor(model, ExecutorConfig(*budgets))
        executor.layers = learned.layers
        executor.profile = lambda find_randomness: None  # type: ignore[method-assign]
        calls.copies = calls.syncs = 0
        calls.names.clear()
        executor.forward_backward(tree, loss, masks if share < 1 else None)
        assert executor.last_stats is not None
        assert executor.last_stats.num_blocks >= 3
        assert (calls.copies, calls.syncs) == (1, 2)  # the times of blocks; the loss
        kernel = "_flash_attention_backward"
        has_flash = any(kernel in called for called in calls.names)
        assert has_flash or name == "mistral"  # branches under a window have no flash
        # A forward alone: its outputs stay on the device.
        calls.copies = calls.syncs = 0
        executor.forward(tree)
        assert (calls.copies, calls.syncs) == (1, 1)


def test_the_count_sees_copies_and_reads():
    """The test above could not fail otherwise."""
    with fake_cuda() as calls:
        x = torch.from_numpy(np.arange(3)).to("cuda")
        assert calls.copies == 1
        torch.zeros(3, device="cuda").copy_(torch.ones(3))
        assert calls.copies == 2
        x.tolist()
        assert calls.syncs == 1
        with pytest.raises(Exception, match="(?i)data.dependent|_local_scalar_dense"):
            float(x.sum())
        with pytest.raises(Exception, match="(?i)dynamic|nonzero"):
            torch.nonzero(x)
