"""Runs trees on a model that FSDP2 shards, within the memory there is.

``dta.reshard``: ``step`` gathers the parameters for a whole pass (`session`), ``block``
around every layer (`lockstep`). ``dta.block_tokens`` and ``dta.retain_tokens`` may be
``auto``; they are then chosen at the first batch, and again if a longer path comes.

Out of memory in ``step`` mode: the rank drops the gradients and the statistics of this
step so far, halves its budgets and runs its trees again. Nothing is communicated within
a pass, so the other ranks need not know, and just wait for it at the end. In ``block``
mode they would be waiting inside a collective: the error is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from areal_dta.engine.fsdp_gather_layer import LockStep
from areal_dta.engine.fsdp_gather_step import forget, forward_pass, training_pass
from areal_dta.engine.statistics import LossStatistics
from areal_dta.executor import GroupLoss, Positions, TreeExecutor
from areal_dta.executor.memory_budget import (
    MAX_BLOCK_TOKENS,
    MIN_BLOCK_TOKENS,
    choose_budgets,
    halved,
    is_out_of_memory,
    measure_graph_bytes,
    predict_memory,
    usable_memory,
)
from areal_dta.schedule import MemoryModel
from areal_dta.tree import PrefixTree

ResultT = TypeVar("ResultT")

AUTO = "auto"
RESHARD_MODES = ("step", "block")
_ADAM_BYTES = 8  # two fp32 moments a parameter
_FP32 = 4


def is_auto(value: Any) -> bool:
    return bool(value == AUTO)


class TreeRunner:
    """One rank's traversals.

    Args:
        options: ``config.dta``, or None for the defaults.
        group: a CPU group of all ranks.
        optimizer: whose state will take memory after the first step.
    """

    def __init__(
        self,
        executor: TreeExecutor,
        options: Any,
        group: dist.ProcessGroup,
        logger: Any,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.executor, self._group, self._logger = executor, group, logger
        self._optimizer = optimizer
        self._lockstep: LockStep | None = None
        mode = getattr(options, "reshard", "step")
        if mode not in RESHARD_MODES:
            raise ValueError(f"dta.reshard={mode}; expected step or block")
        if mode == "block":
            self._lockstep = LockStep(executor.model, group)
            executor.pace = self._lockstep
        self._chooses_block = is_auto(getattr(options, "block_tokens", None))
        self._chooses_retain = is_auto(getattr(options, "retain_tokens", None))
        self._planned_path = 0
        self._memory: MemoryModel | None = None

    def train(
        self,
        tree: PrefixTree,
        group_loss: GroupLoss,
        positions: Positions | None,
        scope: str,
        statistics: LossStatistics,
    ) -> float:
        """The loss of this rank's trees; reduced gradients. Collective."""
        executor, model = self.executor, self.executor.model
        mark = statistics.mark()

        def attempt() -> float:
            return executor.forward_backward_groups(tree, group_loss, positions, scope)

        def undo() -> None:
            forget(model)
            statistics.roll_back(mark)

        with self._training_pass():
            self._choose(tree)
            return self._within_memory(attempt, undo, training=True)

    def forward(self, tree: PrefixTree, positions: Positions | None) -> list[Any]:
        """As `TreeExecutor.forward`. Collective."""
        executor, model = self.executor, self.executor.model
        with self._forward_pass():
            self._choose(tree)
            return self._within_memory(
                lambda: executor.forward(tree, positions),
                lambda: forget(model),
                training=False,
            )

    def _training_pass(self) -> AbstractContextManager[None]:
        if self._lockstep is not None:
            return self._lockstep.training_pass()
        return training_pass(self.executor.model, self._group)

    def _forward_pass(self) -> AbstractContextManager[None]:
        if self._lockstep is not None:
            return self._lockstep.forward_pass()
        return forward_pass(self.executor.model)

    def _within_memory(
        self,
        attempt: Callable[[], ResultT],
        undo: Callable[[], None],
        training: bool,
    ) -> ResultT:
        """``attempt``, and again with smaller budgets as often as memory runs out."""
        while True:
            try:
                return attempt()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                before = self.executor.config
                smaller = halved(before, training)
                if self._lockstep is not None or smaller is None:
                    error.add_note(self._advice())
                    raise
                reason = str(error).split("\n")[0][:200]
            # only now: the error's traceback keeps the block's tensors alive
            undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.executor.config = smaller
            self._logger.warning(
                f"out of memory ({reason}): this step runs again on this rank with "
                f"block_tokens {before.block_tokens} -> {smaller.block_tokens}, "
                f"retain_tokens {before.retain_tokens} -> {smaller.retain_tokens}, "
                "which stay in force"
            )

    def _advice(self) -> str:
        config = self.executor.config
        budgets = (
            f"block_tokens={config.block_tokens}, retain_tokens={config.retain_tokens}"
        )
        if self._lockstep is not None:
            return (
                f"actor.dta: {budgets}, reshard=block: ranks in step cannot repeat a "
                "step; set smaller budgets"
            )
        return (
            f"actor.dta: {budgets} cannot be made smaller; reshard=block, more ranks "
            "or shorter sequences need less memory"
        )

    def _choose(self, tree: PrefixTree) -> None:
        if not (self._chooses_block or self._chooses_retain):
            return
        longest = max(map(tree.sequence_length, range(tree.num_sequences)), default=0)
        if longest <= self._planned_path:
            return
        executor = self.executor
        device = next(executor.model.parameters()).device
        largest, smallest = MAX_BLOCK_TOKENS.get(device.type, 512), MIN_BLOCK_TOKENS
        if not self._chooses_block:
            largest = smallest = executor.config.block_tokens
        num_processes = dist.get_world_size(self._group)
        usable = usable_memory(device, num_processes) - self._pending_bytes()
        budgets = choose_budgets(
            self._memory_model(), usable, longest, largest, smallest
        )
        chosen = budgets.apply(executor.config, retain=self._chooses_retain)
        executor.config, self._planned_path = chosen, longest
        self._logger.info(f"paths of up to {longest} tokens: {budgets}")
        if not budgets.fits:
            self._logger.warning(
                "even the smallest budgets are predicted not to fit; trying them"
            )

    def _memory_model(self) -> MemoryModel:
        if self._memory is None:
            executor = self.executor
            memory = predict_memory(
                executor.model, executor.config, _compute_dtype(executor.model)
            )
            if self._lockstep is None:  # else all ranks would have to take part
                measured = measure_graph_bytes(
                    executor.model, executor.config, outputs=executor.outputs
                )
                forget(executor.model)
                self._logger.info(
                    f"a token's graph takes {measured:.0f} bytes measured, "
                    f"{memory.graph_bytes:.0f} predicted"
                )
                memory = memory.calibrated(measured)
            self._memory = memory
        return self._memory

    def _pending_bytes(self) -> float:
        """What a step will need beside activations and K/V: gradients, and at the
        first step the optimizer's state."""
        pending = 0.0
        for parameter in self.executor.model.parameters():
            if not parameter.requires_grad:
                continue
            whole: Tensor = parameter
            num_ranks = dist.get_world_size(self._group)
            shard = whole.numel() / num_ranks
            if self._lockstep is not None:
                pending += _FP32 * shard
            else:  # in the compute dtype from one backward, in fp32 from all
                pending += whole.numel() * (_FP32 + whole.element_size())
            if self._optimizer is not None and not self._optimizer.state:
                pending += _ADAM_BYTES * shard
        return pending


def _compute_dtype(model: torch.nn.Module) -> torch.dtype:
    """That of FSDP's mixed precision where it is set, else the parameters'."""
    state = getattr(model, "_get_fsdp_state", lambda: None)()
    dtype = getattr(getattr(state, "_mp_policy", None), "param_dtype", None)
    return dtype or next(model.parameters()).dtype
