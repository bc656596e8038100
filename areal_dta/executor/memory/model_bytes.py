"""What a model takes on this machine: a token's graph measured, and all of it gathered.

(Separate module: budget.py is about any model's sizes; this calls the model at hand.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.memory.budget import (
    MIN_CHOSEN_BLOCK,
    Budgets,
    choose_budgets,
    predict_memory,
)
from areal_dta.executor.tree_executor import TreeExecutor
from areal_dta.schedule import MemoryModel
from areal_dta.tree import PrefixTree

_MEASURED_TOKENS = 128


def measured_memory(
    executor: TreeExecutor, memory: MemoryModel
) -> tuple[MemoryModel, str]:
    """Measure the graph of a token, whole and without MLPs and norms.

    Returns:
        ``memory`` with what was measured, and a line that compares them.
    """
    whole, part = (
        measure_graph_bytes(
            executor.model,
            dataclasses.replace(executor.config, recompute=choice),
            outputs=executor.outputs,
        )
        for choice in ("none", "mlp")
    )
    line = (
        f"a token's graph takes {whole:.0f} bytes measured, {memory.graph_bytes:.0f} "
        f"predicted; without MLPs and norms {part:.0f} and "
        f"{memory.part_graph_bytes:.0f}"
    )
    measured = dataclasses.replace(memory, graph_bytes=whole, part_graph_bytes=part)
    return measured, line


def budgets_beside_whole_model(
    model: PreTrainedModel,
    config: ExecutorConfig,
    dtype: torch.dtype,
    usable_bytes: float,
    longest_path: int,
    training: bool,
    chooses_block: bool,
) -> Budgets | None:
    """Return the smallest budgets worth it, beside all parameters and gradients.

    Args:
        dtype: in which the model computes.
        usable_bytes: what parameters, gradients and optimizer leave.
        chooses_block: whether the block is chosen later; else it is the config's.

    Returns:
        None where the model's config lacks a size, so that nothing can be predicted.
    """
    device_type = next(model.parameters()).device.type
    block = config.block_tokens
    if chooses_block:
        block = MIN_CHOSEN_BLOCK.get(device_type, MIN_CHOSEN_BLOCK["cpu"])
    try:
        memory = predict_memory(model, config, dtype)
    except ValueError:
        return None
    return choose_budgets(
        memory, usable_bytes, longest_path, block, block, training, config.recompute
    )


def measure_graph_bytes(
    model: PreTrainedModel,
    config: ExecutorConfig | None = None,
    num_tokens: int = _MEASURED_TOKENS,
    outputs: str = "logprobs",
) -> float:
    """Measure the bytes per token that autograd saves, on a block of ``num_tokens``.

    One output is needed, so that the logits, whose number the batch decides, are left
    out; the last layer runs on all tokens, as where all outputs are needed. No gradient
    is computed.
    """
    config = config or ExecutorConfig()
    config = dataclasses.replace(
        config, block_tokens=num_tokens, retain_tokens=None, whole_last_layer=True
    )
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
        # Index arrays are pieces of one buffer, which belongs to the tree.
        nbytes = tensor.numel() * tensor.element_size()
        if not tensor.is_floating_point() and (
            tensor.untyped_storage().nbytes() > nbytes
        ):
            return tensor
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
