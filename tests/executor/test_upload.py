"""Arrays arrive as they were, in one storage."""

import numpy as np
import pytest
import torch

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.executor.layout import tree_arrays
from areal_dta.executor.layout.upload import upload
from areal_dta.tree import PrefixTree
from tests.models import VOCAB_SIZE, gradients, tiny_model


def test_arrays_of_all_dtypes_and_shapes():
    given = {
        "indices": np.arange(5),
        "lengths": np.array([0, 3], np.int32),
        "flags": np.array([True, False, True]),
        "none": np.empty(0, np.int64),
        "scalar": torch.tensor(7.5, dtype=torch.float64),
        "half": torch.tensor([[1.5, 2.0, -3.0]], dtype=torch.bfloat16).t(),
        "columns": np.arange(12).reshape(3, 4)[:, ::2],
    }
    sent = upload(given, torch.device("cpu"))
    assert list(sent) == list(given)
    for key, x in given.items():
        want = x if isinstance(x, torch.Tensor) else torch.from_numpy(x.copy())
        assert sent[key].dtype == want.dtype
        torch.testing.assert_close(sent[key], want, rtol=0, atol=0)
    assert len({x.untyped_storage().data_ptr() for x in sent.values()}) == 1


def test_nothing():
    assert upload({}, torch.device("cpu")) == {}


@pytest.mark.parametrize("retain_tokens", [None, 0, 20])
@pytest.mark.parametrize("kernel", ["flash_cpu", "masked_softmax"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_a_tree_that_is_uploaded_ahead_trains_as_on_a_cpu(
    monkeypatch, name, kernel, retain_tokens
):
    """What a GPU does, on a CPU: the same numbers to the last bit."""
    draw = np.random.default_rng(0)
    trunk = draw.integers(VOCAB_SIZE, size=20).tolist()
    batch = [trunk[:9], trunk]
    for size in (1, 4, 13, 13):
        branch = trunk[: 5 + size] + draw.integers(VOCAB_SIZE, size=size).tolist()
        batch += [branch, branch + draw.integers(VOCAB_SIZE, size=7).tolist()]
    tree = PrefixTree.from_sequences(batch)
    found = []
    for is_ahead in (False, True):
        monkeypatch.setattr(
            tree_arrays, "uploads_ahead", lambda device, is_ahead=is_ahead: is_ahead
        )
        model = tiny_model(name)
        executor = TreeExecutor(model, ExecutorConfig(8, retain_tokens, kernel=kernel))
        loss = executor.forward_backward(tree, lambda i, x, _: (x * (i + 1)).sum())
        found.append((loss, gradients(model)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
