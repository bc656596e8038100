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
import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.fused_logprobs import logit_sizes
from areal_dta.executor.kernels import accumulation_dtype
from areal_dta.executor.kernels.masked_softmax import MAX_SCORES
from areal_dta.executor.states.kinds import stateful_layers
from areal_dta.schedule import MemoryModel

# Larger blocks are no faster on a CPU (docs/log.md); a GPU needs more work per call.
MAX_BLOCK_TOKENS = {"cpu": 512, "cuda": 4096}
MIN_BLOCK_TOKENS = 32
# Below this a GPU is slower than dense training. Where it is predicted not to fit it is
# tried all the same: predictions are upper bounds, and out of memory is retried.
MIN_CHOSEN_BLOCK = {"cpu": MIN_BLOCK_TOKENS, "cuda": 512}
# Seconds of a pass, relative to one with large blocks and whole graphs. From the
# roofline model of an H200: blocks of an eighth of the largest take 1.85 times as long,
# GEMMs grow by a sixth where MLPs run again, and the forward of trunks that are run
# again (taken to be half of the tokens) is a third of the work.
_SLOW_BLOCK, _MLP_AGAIN, _RUN_AGAIN = 0.85, 0.17, 0.17
_ADAM_BYTES = 8  # two fp32 moments per parameter
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
    recompute: str = "none"
    """`ExecutorConfig.recompute`."""

    @property
    def fits(self) -> bool:
        """Whether they are predicted to fit; False only for the smallest budgets."""
        return self.predicted_bytes <= self.usable_bytes

    def apply(self, config: ExecutorConfig, retain: bool = True) -> ExecutorConfig:
        """Return ``config`` with these; ``retain``: with ``retain_tokens`` too."""
        config = dataclasses.replace(config, recompute=self.recompute)
        kept = self.retain_tokens if retain else config.retain_tokens
        block = self.block_tokens
        return dataclasses.replace(config, block_tokens=block, retain_tokens=kept)

    def __str__(self) -> str:
        return (
            f"block_tokens={self.block_tokens}, retain_tokens={self.retain_tokens}, "
            f"recompute={self.recompute}: {self.predicted_bytes / 2**30:.2f} GiB "
            f"predicted of {self.usable_bytes / 2**30:.2f} GiB usable"
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
    chunk, slab = logit_sizes(parameter.device.type, config.logit_chunk_elements)
    dtype, sizes = dtype or parameter.dtype, model.config.get_text_config()
    memory = MemoryModel.from_config(sizes, dtype.itemsize, chunk, slab)
    acc = accumulation_dtype(dtype).itemsize
    layers = stateful_layers(model)
    elements = sum(layer.state_elements for layer in layers)
    tails = sum(layer.tail_elements for layer in layers)
    memory = dataclasses.replace(
        memory,
        state_bytes=float(elements * acc + tails * dtype.itemsize),
        state_grad_bytes=float(2 * (elements + tails) * acc),
    )
    if not needs_masked_softmax(sizes, parameter.device.type, dtype):
        return memory if parameter.device.type == "cpu" else memory.with_one_output()
    return dataclasses.replace(memory, max_scores=MAX_SCORES)


def needs_masked_softmax(sizes: Any, device_type: str, dtype: torch.dtype) -> bool:
    """Return whether some layer is served by the masked-softmax kernel.

    Args:
        sizes: the model's text config.
    """
    windows = getattr(sizes, "layer_types", None) or []
    has_windows = "sliding_attention" in windows or (
        bool(getattr(sizes, "sliding_window", None))
        and bool(getattr(sizes, "use_sliding_window", True))
    )
    has_softcap = bool(getattr(sizes, "attn_logit_softcapping", None))
    is_full = device_type == "cuda" and dtype not in (torch.float16, torch.bfloat16)
    return has_windows or has_softcap or is_full


def choose_budgets(
    memory: MemoryModel,
    usable_bytes: float,
    longest_path: int,
    max_block: int = MAX_BLOCK_TOKENS["cpu"],
    min_block: int = MIN_BLOCK_TOKENS,
    training: bool = True,
    recompute: str = "none",
) -> Budgets:
    """Choose the fastest budgets whose predicted peak fits, with all outputs needed.

    Memory grows with the longest path, not with the tree, so the path is all that has
    to be known of the batch. The block is ``max_block``, a half, a quarter, ... of it.

    Args:
        usable_bytes: for activations and K/V; see `usable_memory`.
        longest_path: tokens of the longest sequence.
        training: without it there are neither gradients nor retained graphs.
        recompute: `ExecutorConfig.recompute`; ``auto`` takes ``mlp`` where the larger
            blocks, or the graphs retained, that it leaves room for are worth it.
    """
    choices = (recompute,) if recompute != "auto" or not training else ("auto", "mlp")

    def seconds(budgets: Budgets) -> tuple[bool, float]:
        slow = (max_block / 8 / budgets.block_tokens) ** 2
        again = 1 - min(1.0, budgets.retain_tokens / max(1, longest_path))
        cost = (1 + _SLOW_BLOCK * slow) * (1 + _RUN_AGAIN * again * training)
        if budgets.recompute == "mlp":
            cost *= 1 + _MLP_AGAIN
        return not budgets.fits, cost

    found = (
        _largest_budgets(
            memory, usable_bytes, longest_path, max_block, min_block, training, choice
        )
        for choice in choices
    )
    return min(found, key=seconds)


def _largest_budgets(
    memory: MemoryModel,
    usable_bytes: float,
    longest_path: int,
    max_block: int,
    min_block: int,
    training: bool,
    recompute: str,
) -> Budgets:
    is_part = recompute == "mlp"
    block = max_block
    while True:
        # K/V: the path buffer, and the trunks of the fragments that make it up
        fixed = memory.path(2 * longest_path, training) + block * memory.kv_bytes
        fixed += memory.working(block, block, training)
        fixed += memory.scores(block, longest_path)
        # States where blocks of the path hang on one another, and at two forks more.
        fixed += memory.states(longest_path / block + 2, training)
        left = usable_bytes - fixed
        # A forward alone holds what one layer makes, which `working` has.
        graph_token = memory.hidden_bytes
        if training:
            graph_token = memory.graph(1, 1, is_part, block_outputs=block)
        if left >= block * graph_token or block <= min_block:
            break
        block = max(min_block, block // 2)
    # Whole blocks, so that the number is steady although free memory never is.
    retain = max(0, int(left / graph_token)) // block * block
    retain = retain if retain > block and training else 0
    return Budgets(
        block_tokens=block,
        retain_tokens=retain,
        predicted_bytes=fixed + max(block, retain) * graph_token,
        usable_bytes=usable_bytes,
        recompute=recompute,
    )


def halved(
    config: ExecutorConfig, training: bool = True, retained: int | None = None
) -> ExecutorConfig | None:
    """Return smaller budgets after an out-of-memory error, or None at the smallest.

    Retained graphs go first: giving them up costs least. But where few or none were
    alive they were not the cause, and the block is halved.

    Args:
        training: without it no graph is retained.
        retained: tokens whose graphs were retained when memory ran out; None: unknown.
    """
    block, retain = config.block_tokens, config.retain_tokens
    if not training:
        retain = 0
    can_shrink = block > MIN_BLOCK_TOKENS and config.fragments != "node"
    smaller_block = dataclasses.replace(
        config, block_tokens=max(MIN_BLOCK_TOKENS, block // 2)
    )
    if can_shrink and retained is not None and retained < block:
        return smaller_block
    if retain is None:
        retain = 8 * block if retained is None else retained // 2 // block * block
        return dataclasses.replace(config, retain_tokens=retain)
    if retain > block:
        retain = retain // 2 if retain // 2 > block else 0
        return dataclasses.replace(config, retain_tokens=retain)
    return smaller_block if can_shrink else None


def shortage_advice(config: ExecutorConfig, is_layerwise: bool) -> str:
    """Return what to do where budgets cannot be made smaller."""
    budgets = (
        f"block_tokens={config.block_tokens}, retain_tokens={config.retain_tokens}"
    )
    if is_layerwise:
        return (
            f"actor.dta: {budgets}, reshard=block: ranks in step cannot repeat a "
            "step; set smaller budgets"
        )
    return (
        f"actor.dta: {budgets} cannot be made smaller; reshard=block, more ranks "
        "or shorter sequences need less memory"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether smaller budgets may help.

    A host's allocator raises a plain RuntimeError, and so do CUDA's libraries where
    they find no room for their workspace.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text
        or "can't allocate memory" in text
        or "status_alloc_failed" in text  # of cuBLAS and cuDNN
    )


def release_memory() -> None:
    """Return what is unused to the device, reference cycles of a failed pass included:
    tracebacks and graphs hold tensors in cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reserve(sizes: Sequence[int], device: torch.device) -> None:
    """Make sure that tensors of these bytes can be allocated, all at the same time.

    On a GPU the allocator keeps what was reserved for the next tensors of these sizes.

    Raises:
        RuntimeError: they cannot, even after `release_memory`.
    """
    for is_last in (False, True):
        try:
            held = [_allocate(size, device) for size in sizes]
            del held
            return
        except Exception as error:
            if is_last or not is_out_of_memory(error):
                raise
        release_memory()  # not in the handler: the error holds what was allocated


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


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


def pending_bytes(
    groups: list[tuple[int, int]],
    num_trainable: int,
    num_ranks: int,
    trains: bool,
    has_moments: bool,
    is_layerwise: bool,
) -> float:
    """Return what a step will take beside activations and K/V.

    Args:
        groups: per module that is gathered, the bytes of its parameters and of their
            gradients in the dtype of the reduction; the outermost first.
        num_trainable: parameters, over all ranks.
        trains: False for references and teachers, which have no gradients.
        has_moments: whether the optimizer's state exists already.
        is_layerwise: parameters are not gathered yet, but layer by layer.
    """
    gathered, reduced = ([group[i] for group in groups] for i in (0, 1))
    pending = 0.0
    if is_layerwise:  # the outermost module, and two layers at once
        pending += gathered[0] + 2 * max(gathered)
    if trains:
        # Gradients of one module in the compute dtype. All are in the dtype of the
        # reduction: whole, or in shards and two whole modules in flight.
        pending += max(gathered)
        pending += (
            sum(reduced) / num_ranks + 2 * max(reduced)
            if is_layerwise
            else sum(reduced)
        )
    if trains and not has_moments:
        pending += _ADAM_BYTES * num_trainable / num_ranks
    return pending
