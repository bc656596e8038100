"""Arrays of the host, moved to a device together.

A copy from pageable memory makes the host wait until the device has done everything
before it. So the index arrays of a whole tree, and the tensors of a loss call, are laid
end to end in one pinned buffer, which is copied once without waiting; what is handed
out are views of the copy (tests/executor/test_upload.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

KeyT = TypeVar("KeyT", bound=Hashable)

_ALIGNMENT = 16  # bytes; vector loads of any dtype


def uploads_ahead(device: torch.device) -> bool:
    """Return whether the index arrays of a tree are uploaded before its first block.

    A CPU has nothing to wait for, and its memory need not hold those of all blocks.
    """
    return device.type != "cpu"


def upload(
    arrays: Mapping[KeyT, np.ndarray | Tensor], device: torch.device
) -> dict[KeyT, Tensor]:
    """Return arrays of the host as tensors of the same kind on ``device``."""
    # Lay them end to end.
    starts: dict[KeyT, int] = {}
    size = 0
    for key, array in arrays.items():
        starts[key] = size
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = np.zeros(size, np.uint8)
    for key, array in arrays.items():
        start = starts[key]
        buffer[start : start + array.nbytes] = _bytes(array)
    # One copy. The allocator of pinned memory keeps the buffer until it is over.
    host = torch.from_numpy(buffer)
    if device.type == "cuda" and torch.cuda.is_available():
        host = host.pin_memory()
    sent = host.to(device, non_blocking=True)
    return {
        key: sent[starts[key] : starts[key] + array.nbytes]
        .view(_dtype(array))
        .view(array.shape)
        for key, array in arrays.items()
    }


def _bytes(array: np.ndarray | Tensor) -> np.ndarray:
    if isinstance(array, Tensor):  # NumPy has no bf16
        array = array.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _dtype(array: np.ndarray | Tensor) -> torch.dtype:
    if isinstance(array, Tensor):
        return array.dtype
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
