"""What stays alive follows the longest path, not the number of branches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.schedule import build_schedule
from areal_dta.tree import PrefixTree
from tests.models import VOCAB_SIZE, tiny_model


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made under it that are still alive."""

    def __init__(self, *existing: torch.Tensor) -> None:
        """``existing`` are not counted, though operations may return them."""
        super().__init__()
        self._existing = {t.untyped_storage().data_ptr() for t in existing}
        self._seen = WeakTensorKeyDictionary()
        self._storages: dict[int, int] = {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or tensor in self._seen:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._existing:
                self._seen[tensor] = self._hold(storage)
        return out

    def _hold(self, storage):
        return _Hold(self, storage.data_ptr(), storage.nbytes())


class _Hold:
    """One reference to a storage; the last one gone frees its bytes."""

    def __init__(self, counter: LiveBytes, key: int, num_bytes: int) -> None:
        self.counter, self.key, self.num_bytes = counter, key, num_bytes
        count = counter._storages.get(key, 0)
        counter._storages[key] = count + 1
        if count == 0:
            counter.live += num_bytes
            counter.peak = max(counter.peak, counter.live)

    def __del__(self) -> None:
        self.counter._storages[self.key] -= 1
        if self.counter._storages[self.key] == 0:
            del self.counter._storages[self.key]
            self.counter.live -= self.num_bytes


def counted(model, executor: TreeExecutor, tree: PrefixTree) -> LiveBytes:
    # Parameter gradients exist before the count: they are not per token.
    executor.forward_backward(tree, lambda i, lp, h: lp.sum())
    counter = LiveBytes(*[p.grad for p in model.parameters()], *model.parameters())
    with counter:
        executor.forward_backward(tree, lambda i, lp, h: lp.sum())
    return counter


def peak_bytes(num_branches: int, retain_tokens: int | None) -> int:
    """Return the peak of activations, K/V and their gradients.

    Without what every token costs once: its id, four scalars (logprob, entropy and
    their gradients) and two flags.
    """
    trunk = [i % VOCAB_SIZE for i in range(96)]
    batch = []
    for b in range(num_branches):
        tail = [b % VOCAB_SIZE, b // VOCAB_SIZE, *range(30)]
        batch.append([*trunk, *tail])
    model = tiny_model("qwen3")
    executor = TreeExecutor(model, ExecutorConfig(32, retain_tokens))
    tree = PrefixTree.from_sequences(batch)
    per_token = 8 + 4 * 4 + 2
    return counted(model, executor, tree).peak - per_token * tree.num_tree_tokens


def test_branches_cost_no_memory_when_nothing_is_retained():
    few, many = peak_bytes(16, 0), peak_bytes(256, 0)
    assert many <= 1.05 * few, (few, many)


def test_retaining_graphs_costs_memory():
    """The counter must see graphs, or the test above could not fail."""
    assert peak_bytes(16, None) > 1.5 * peak_bytes(16, 0)


@pytest.mark.parametrize("retain_tokens", [0, 40, None])
def test_graphs_are_freed_at_the_end(retain_tokens):
    model = tiny_model("qwen3")
    executor = TreeExecutor(model, ExecutorConfig(8, retain_tokens))
    tree = PrefixTree.from_sequences([[1, 2, 3, *range(20)], [1, 2, 3, 9, 9]])
    assert counted(model, executor, tree).live == 0


def test_peak_of_the_schedule_is_what_is_reported():
    tree = PrefixTree.from_sequences([list(range(30)), list(range(20)) + [39] * 9])
    executor = TreeExecutor(tiny_model("qwen3"), ExecutorConfig(8, 16))
    executor.forward_backward(tree, lambda i, lp, h: lp.sum())
    schedule = build_schedule(tree, 8, 16)
    stats = executor.last_stats
    assert stats is not None
    assert stats.peak_graph_tokens == schedule.peak_graph_tokens <= 16
    assert stats.peak_kv_tokens == schedule.peak_kv_tokens
