"""Arrays arrive as they were, in one storage."""

import numpy as np
import torch

from areal_dta.executor.kernels.upload import upload


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
