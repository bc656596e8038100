"""Depth-first execution of a prefix tree: every token once, gradients exact.

Method: arXiv 2602.00482, section 3, over fragments instead of single nodes. Losses are
evaluated on detached values and their gradients injected: logprobs per edge, entropies
and values per position, keys and values per path token. A fragment's backward starts
from all that was injected into it, so the sum over all branches through it is exact,
and each branch's graph is freed as soon as it is done.

Invariants, and the tests that hold them (tests/executor):
  * gradients equal one-sequence-at-a-time training: test_parity.py, for losses over
    the whole batch and for critics: test_scopes.py
  * the same for any block and retain budget, child order and batch order: the same
  * only what is read is computed: test_positions.py
  * memory follows the longest path, not the number of branches: test_memory.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.attention import tree_attention
from areal_dta.executor.block import FreePace, Pace, idle_outputs
from areal_dta.executor.config import ExecutionStats, ExecutorConfig
from areal_dta.executor.model_support import check_model_supported
from areal_dta.executor.oracle import SequenceOutput, ValueOutput
from areal_dta.executor.outputs import make_head
from areal_dta.executor.telemetry import BlockTimer
from areal_dta.executor.traversal import GroupLoss, Traversal, as_scalar
from areal_dta.schedule import (
    BlockSample,
    NeededOutputs,
    Schedule,
    StepKind,
    build_schedule,
)
from areal_dta.tree import PrefixTree

Positions = Sequence[np.ndarray]
"""Per sequence a mask of the outputs that are read: [len-1] for logprobs, entry t
belonging to token t+1; [len] for values."""


class TreeExecutor:
    """Runs prefix trees through a Hugging Face decoder.

    Between calls the model is untouched: its attention is replaced during a call only.

    Args:
        outputs: ``logprobs`` (with entropies), of a causal language model; or
            ``values``, of a model with one number a token (critic, reward model).

    Raises:
        UnsupportedModelError: the model cannot be split at a prefix.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExecutorConfig | None = None,
        outputs: str = "logprobs",
    ) -> None:
        self.model = model
        self.config = config or ExecutorConfig()
        self.outputs = outputs
        self.pace: Pace = FreePace()
        self.last_stats: ExecutionStats | None = None
        self.last_schedule: Schedule | None = None
        self.last_samples: list[BlockSample] = []
        """Seconds of each block of the last call, both passes of it if it took two;
        empty where a block waits for other ranks."""
        check_model_supported(model, training=False)
        self._head = make_head(outputs, model, self.config)

    def forward(
        self, tree: PrefixTree, positions: Positions | None = None
    ) -> list[Any]:
        """Outputs of every sequence, in input order, without gradients.

        With ``positions`` only what they name is computed; the rest is 0.

        Returns:
            A SequenceOutput (logprobs and entropy [len-1]) or a ValueOutput (values
            [len]) for each sequence, fp32 (fp64 for an fp64 model).
        """
        traversal = self._forward(tree, self._needed(tree, positions))
        kind: Any = SequenceOutput if self.outputs == "logprobs" else ValueOutput
        return [kind(*traversal.outputs(i)) for i in range(tree.num_sequences)]

    def forward_backward(
        self,
        tree: PrefixTree,
        sequence_loss: Callable[..., Tensor],
        positions: Positions | None = None,
    ) -> float:
        """Sum of ``sequence_loss`` over the sequences; gradients accumulate.

        ``sequence_loss(index, logprobs, entropy)``, or ``(index, values)``, gets
        detached values that require grad and returns a scalar. All arguments carry
        gradients. With ``positions`` only what they name is computed, the rest is 0
        and must not be learned from.

        Raises:
            UnsupportedModelError: the model, as it is set now, cannot be trained.
            ValueError: a loss is not a scalar tensor, or has a gradient at a position
                that was skipped.
        """

        def group_loss(indices: list[int], *outputs: list[Tensor]) -> Tensor:
            losses = map(sequence_loss, indices, *outputs)
            return torch.stack([as_scalar(loss) for loss in losses]).sum()

        return self.forward_backward_groups(tree, group_loss, positions)

    def forward_backward_groups(
        self,
        tree: PrefixTree,
        group_loss: GroupLoss,
        positions: Positions | None = None,
        scope: str = "sequence",
    ) -> float:
        """As ``forward_backward``, for a loss over several sequences.

        ``group_loss(indices, logprobs, entropies)``, or ``(indices, values)``, gets
        one tensor a sequence in each list.

        Args:
            scope: ``sequence`` calls the loss once for each block in which sequences
                end, in depth-first order, and adds up: exact for losses that are sums
                over sequences. ``batch`` calls it once, on all sequences in input
                order: exact for any loss, for one more forward.
        """
        check_model_supported(self.model, training=True)
        needed = self._needed(tree, positions)
        if scope == "sequence":
            return self._train(tree, needed, group_loss, None).total_loss
        if scope != "batch":
            raise ValueError(f"scope={scope!r}; expected sequence or batch")
        collected = self._forward(tree, needed)
        if tree.num_sequences:
            with torch.enable_grad():
                collected.inject(group_loss, list(range(tree.num_sequences)))
        self._train(tree, needed, None, collected)
        return collected.total_loss

    def _needed(self, tree: PrefixTree, positions: Positions | None) -> NeededOutputs:
        if self.outputs == "values":
            return NeededOutputs.values_at(tree, positions)
        return (
            NeededOutputs.all(tree)
            if positions is None
            else NeededOutputs.logprobs_at(tree, positions)
        )

    def _forward(self, tree: PrefixTree, needed: NeededOutputs) -> Traversal:
        self.last_samples = []
        with torch.no_grad():
            schedule = self._schedule(tree, needed, training=False)
            traversal = self._start(tree, schedule, None)
            self._walk(tree, traversal, schedule)
        return traversal

    def _train(
        self,
        tree: PrefixTree,
        needed: NeededOutputs,
        loss: GroupLoss | None,
        injected: Traversal | None,
    ) -> Traversal:
        if injected is None:
            self.last_samples = []
        with torch.enable_grad():
            schedule = self._schedule(tree, needed, training=True)
            traversal = self._start(tree, schedule, loss)
            if injected is not None:
                traversal.channels = injected.channels
            self._walk(tree, traversal, schedule)
        return traversal

    def _schedule(
        self, tree: PrefixTree, needed: NeededOutputs, training: bool
    ) -> Schedule:
        config = self.config
        schedule = build_schedule(
            tree,
            config.block_tokens,
            config.retain_tokens,
            training,
            needed,
            config.fragments,
        )
        self.last_schedule = schedule
        self.last_stats = ExecutionStats.of(tree, schedule)
        return schedule

    def _start(
        self, tree: PrefixTree, schedule: Schedule, loss: GroupLoss | None
    ) -> Traversal:
        return Traversal(
            self.model, self._head, self.config, tree, schedule, loss, self.pace
        )

    def _walk(self, tree: PrefixTree, traversal: Traversal, schedule: Schedule) -> None:
        timer = BlockTimer(next(self.model.parameters()).device)
        if schedule.steps or self.pace.calls_when_empty:
            with (
                tree_attention(self.model),
                self.pace.traversal(schedule, self._idle_call),
            ):
                for step in schedule.steps:
                    with timer.step():
                        if step.kind is StepKind.ENTER:
                            traversal.enter(step)
                        else:
                            traversal.exit(step)
        traversal.finish()
        if not self.pace.waits_for_others:
            self.last_samples += timer.samples(tree, schedule)
        if traversal.router_load is not None and self.last_stats is not None:
            load = traversal.router_load.counts
            self.last_stats = dataclasses.replace(self.last_stats, expert_load=load)

    def _idle_call(self) -> list[Tensor]:
        return idle_outputs(self.model, self._head, self.config.kernel)
