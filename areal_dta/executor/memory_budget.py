"""The block size and the retain budget are chosen here, to fit a model into memory.

The bytes per token are predicted from the model's config (schedule/memory.py); the
largest term, what autograd saves, is measured once on a short block. Blocks are as
large as is fast on the device, smaller where they do not fit; what is left retains
graphs. After an out-of-memory error `halved` gives the next smaller budgets.

Invariants, and the tests that hold them: predictions match counted bytes, chosen
budgets fit, and more memory never gives smaller ones (test_memory_budget.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.fused_logprobs import slab_elements
from areal_dta.executor.tree_executor import TreeExecutor
from areal_dta.schedule import MemoryModel
from areal_dta.tree import PrefixTree

# Larger blocks are no faster on a CPU (docs/log.md); a GPU needs more work per call.
MAX_BLOCK_TOKENS = {"cpu": 512, "cuda": 4096}
MIN_BLOCK_TOKENS = 32
_MEASURED_TOKENS = 128
# The rest is for fragmentation and for whatever else runs: little on a GPU, much on a
# host, whose memory is shared with the user's other programs.
_USABLE = {"cpu": 0.5, "cuda": 0.85}


@dataclass(frozen=True, slots=True)
class Budgets:
    """The chosen budgets, with the bytes predicted for them."""

    block_tokens: int
    retain_tokens: int
    predicted_bytes: float
    """Peak of activations and K/V at these budgets."""
    usable_bytes: float

    @property
    def fits(self) -> bool:
        """Whether they are predicted to fit; False only for the smallest budgets."""
        return self.predicted_bytes <= self.usable_bytes

    def apply(self, config: ExecutorConfig, retain: bool = True) -> ExecutorConfig:
        """Return ``config`` with these; ``retain``: with ``retain_tokens`` too."""
        config = dataclasses.replace(config, block_tokens=self.block_tokens)
        if retain:
            config = dataclasses.replace(config, retain_tokens=self.retain_tokens)
        return config

    def __str__(self) -> str:
        return (
            f"block_tokens={self.block_tokens}, retain_tokens={self.retain_tokens}: "
            f"{self.predicted_bytes / 2**30:.2f} GiB predicted of "
            f"{self.usable_bytes / 2**30:.2f} GiB usable"
        )


def predict_memory(
    model: PreTrainedModel, config: ExecutorConfig, dtype: torch.dtype | None = None
) -> MemoryModel:
    """Predict the bytes per token of ``model``, on the device where it is.

    Args:
        dtype: in which it computes, if not that of its parameters.

    Raises:
        ValueError: its config lacks a size; the message names it.
    """
    parameter = next(model.parameters())
    chunk = config.logit_chunk_elements
    return MemoryModel.from_config(
        model.config.get_text_config(),
        (dtype or parameter.dtype).itemsize,
        chunk,
        slab_elements(parameter.device, chunk),
    )


def choose_budgets(
    memory: MemoryModel,
    usable_bytes: float,
    longest_path: int,
    max_block: int = MAX_BLOCK_TOKENS["cpu"],
    min_block: int = MIN_BLOCK_TOKENS,
) -> Budgets:
    """Choose the largest budgets whose predicted peak fits, with all outputs needed.

    Memory grows with the longest path, not with the tree, so the path is all that has
    to be known of the batch. The block is ``max_block``, a half, a quarter, ... of it.

    Args:
        usable_bytes: for activations and K/V; see `usable_memory`.
        longest_path: tokens of the longest sequence.
    """
    block = max_block
    while True:
        # K/V: the path buffer, and the trunks of the fragments that make it up
        kv = memory.path(2 * longest_path + block)
        fixed = kv + memory.working(block, block)
        left = usable_bytes - fixed
        graph_token = memory.graph(1, 1)
        if left >= block * graph_token or block <= min_block:
            break
        block = max(min_block, block // 2)
    # Whole blocks, so that the number is steady although free memory never is.
    retain = max(0, int(left / graph_token)) // block * block
    retain = retain if retain > block else 0
    return Budgets(
        block_tokens=block,
        retain_tokens=retain,
        predicted_bytes=fixed + max(block, retain) * graph_token,
        usable_bytes=usable_bytes,
    )


def halved(config: ExecutorConfig, training: bool = True) -> ExecutorConfig | None:
    """Return smaller budgets after an out-of-memory error, or None at the smallest.

    Retained graphs go first: giving them up costs least. Without ``training`` there
    are none.
    """
    block, retain = config.block_tokens, config.retain_tokens
    if not training:
        retain = 0
    if retain is None:
        return dataclasses.replace(config, retain_tokens=8 * block)
    if retain > block:
        retain = retain // 2 if retain // 2 > block else 0
        return dataclasses.replace(config, retain_tokens=retain)
    if block <= MIN_BLOCK_TOKENS or config.fragments == "node":
        return None
    block = max(MIN_BLOCK_TOKENS, block // 2)
    return dataclasses.replace(config, block_tokens=block)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether smaller budgets may help.

    A host's allocator raises a plain RuntimeError.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text
    )


def usable_memory(device: torch.device, num_processes: int = 1) -> float:
    """Return the bytes that a process may still take on a device.

    Args:
        num_processes: how many share a host's memory; a GPU belongs to one.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device)
        return _USABLE["cuda"] * (free + cached - torch.cuda.memory_allocated(device))
    return _USABLE["cpu"] * _free_host_bytes() / num_processes


def _free_host_bytes() -> float:
    """Return the free memory of this machine, or of the container."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(
            line.split(":", 1) for line in meminfo.read_text().splitlines() if line
        )
        if "MemAvailable" in fields:
            limits.append(1024.0 * float(fields["MemAvailable"].split()[0]))
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (group / "memory.current").exists():
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = float((group / "memory.current").read_text())
            limits.append(max(0.0, float(limit) - used))
    return min(limits)


def measure_graph_bytes(
    model: PreTrainedModel,
    config: ExecutorConfig | None = None,
    num_tokens: int = _MEASURED_TOKENS,
    outputs: str = "logprobs",
) -> float:
    """Measure the bytes per token that autograd saves, on a block of ``num_tokens``.

    One output is needed, so that the logits, whose number the batch decides, are left
    out. No gradient is computed.
    """
    config = config or ExecutorConfig()
    config = dataclasses.replace(config, block_tokens=num_tokens, retain_tokens=None)
    length = num_tokens + (outputs == "logprobs")  # the last token is a label only
    tree = PrefixTree.from_sequences([np.zeros(length, np.int64)])
    read = np.zeros(num_tokens, bool)
    read[-1] = True
    with _saved_bytes(model) as saved:
        TreeExecutor(model, config, outputs).forward_backward(
            tree, lambda index, *outputs: torch.zeros(()), [read]
        )
    return sum(saved.values()) / num_tokens


@contextmanager
def _saved_bytes(model: PreTrainedModel) -> Iterator[dict[int, int]]:
    """Record storages saved for a backward, except parameters: key -> bytes."""
    existing = [*model.parameters(), *model.buffers()]
    known = {_storage_key(t) for t in existing}
    saved: dict[int, int] = {}
    alive: list[Tensor] = []  # addresses are reused once a tensor is gone

    def pack(tensor: Tensor) -> Tensor:
        key = _storage_key(tensor)
        if key not in known and not isinstance(tensor, torch.nn.Parameter):
            saved[key] = tensor.untyped_storage().nbytes()
            alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
    alive.clear()


def _storage_key(tensor: Tensor) -> int:
    if hasattr(tensor, "to_local"):  # a sharded parameter
        tensor = tensor.to_local()
    return int(tensor.untyped_storage().data_ptr())
