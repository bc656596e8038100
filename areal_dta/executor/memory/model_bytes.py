"""What a model takes on this machine: a token's graph measured, and all of it gathered.

(Separate module: budget.py is about any model's sizes; this calls the model at hand.)
"""

from __future__ import annotations

import dataclasses

import torch
from transformers import PreTrainedModel

from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.memory.budget import (
    MIN_CHOSEN_BLOCK,
    Budgets,
    choose_budgets,
    measure_graph_bytes,
    predict_memory,
)
from areal_dta.executor.tree_executor import TreeExecutor
from areal_dta.schedule import MemoryModel


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
