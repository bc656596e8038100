"""Depth-first execution of a prefix tree: every token once, gradients exact.

Method: arXiv 2602.00482, section 3, over fragments instead of single nodes. Losses are
evaluated on detached values and their gradients injected: logprobs per edge, entropies
and values per position, keys and values per path token. A fragment's backward starts
from all that was injected into it, so the sum over all branches through it is exact,
and each branch's graph is freed as soon as it is done.

Invariants, and the tests that hold them (tests/executor):
  * gradients equal one-sequence-at-a-time training: test_parity.py, test_losses.py;
    for losses over the whole batch and for critics: test_scopes.py
  * the same for any block and retain budget, child order and batch order: the same
  * only needed outputs are computed: test_needed_outputs.py
  * memory follows the longest path, not the number of branches: test_memory.py
  * same batch, same bits; half precision as good as dense: test_numerics.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.attention import LayerAttention, model_attention
from areal_dta.executor.block import (
    BlockWatch,
    Pace,
    idle_outputs,
    probe_outputs,
)
from areal_dta.executor.checks.attention_profile import profile_attention
from areal_dta.executor.config import ExecutionStats, ExecutorConfig
from areal_dta.executor.fused import FusedLayers
from areal_dta.executor.last_layer import LastLayer, find_last_layer
from areal_dta.executor.memory.recompute import partial_graph
from areal_dta.executor.model_refusals import check_model_supported, check_no_autocast
from areal_dta.executor.oracle import SequenceOutput, ValueOutput
from areal_dta.executor.outputs import make_head
from areal_dta.executor.states.kinds import stateful_layers
from areal_dta.executor.states.protocol import StatefulLayer, on_trees
from areal_dta.executor.telemetry import BlockTimer
from areal_dta.executor.traversal import GroupLoss, Traversal, as_scalar
from areal_dta.schedule import (
    BlockSample,
    NeededOutputs,
    PartialGraph,
    Schedule,
    StepKind,
    build_schedule,
)
from areal_dta.tree import PrefixTree

Positions = Sequence[np.ndarray]
"""A mask of the needed outputs per sequence: [len-1] for logprobs, where entry t
belongs to token t+1; [len] for values."""


class TreeExecutor:
    """Runs prefix trees through a Hugging Face decoder.

    The model's attention is replaced during a call only; between calls the model is
    untouched.

    Args:
        outputs: ``logprobs`` (with entropies), of a causal language model; or
            ``values``, of a model with one scalar per token (critic, reward model).

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
        self.pace = Pace()
        self.last_stats: ExecutionStats | None = None
        self.last_schedule: Schedule | None = None
        self.last_samples: list[BlockSample] = []
        """Seconds of each block of the last call, of both passes if it took two; empty
        where a block waits for other ranks."""
        self.retained_at_failure: int | None = None
        """Tokens whose graphs were retained when the last call failed."""
        check_model_supported(model, training=False)
        self._head = make_head(outputs, model, self.config)
        self.layers: dict[int, LayerAttention] = {}
        """What each layer asks of its attention; known from the first call on."""
        self.fused: FusedLayers | None = None
        """Layers that run as fused kernels during a call; known from ``fuse`` on."""
        self._last_layer: LastLayer | None = None
        self._knows_last_layer = self.config.whole_last_layer
        self._is_profiled = self._knows_randomness = False

    def forward(
        self, tree: PrefixTree, positions: Positions | None = None
    ) -> list[Any]:
        """Compute the outputs of every sequence, in input order, without gradients.

        Args:
            positions: the needed outputs; the others are 0. None: all.

        Returns:
            Per sequence a SequenceOutput (logprobs and entropy, [len-1]) or a
            ValueOutput (values, [len]), fp32 (fp64 for an fp64 model).
        """
        self.last_samples = []
        traversal = self._traverse(tree, self._needed(tree, positions), training=False)
        kind: Any = SequenceOutput if self.outputs == "logprobs" else ValueOutput
        return [kind(*traversal.outputs(i)) for i in range(tree.num_sequences)]

    def forward_backward(
        self,
        tree: PrefixTree,
        sequence_loss: Callable[..., Tensor],
        positions: Positions | None = None,
    ) -> float:
        """Return the sum of ``sequence_loss`` over the sequences; accumulate gradients.

        Args:
            sequence_loss: called as ``(index, logprobs, entropy)`` or ``(index,
                values)`` on detached tensors that require grad; returns a scalar
                tensor. It may use every argument.
            positions: the needed outputs. The others are 0, and the loss must not
                have a gradient there. None: all.

        Raises:
            UnsupportedModelError: the model, as it is set now, cannot be trained.
            ValueError: a loss is not a scalar tensor, or has a gradient at an output
                that was skipped.
        """
        return self.forward_backward_groups(tree, _summed(sequence_loss), positions)

    def forward_backward_groups(
        self,
        tree: PrefixTree,
        group_loss: GroupLoss,
        positions: Positions | None = None,
        scope: str = "sequence",
        router_weights: Sequence[float] | None = None,
    ) -> float:
        """Do what ``forward_backward`` does, for a loss over several sequences.

        Args:
            group_loss: called as ``(indices, logprobs, entropies)`` or ``(indices,
                values)``, with one tensor per sequence in each list.
            scope: ``sequence`` calls the loss once per block in which sequences end,
                in depth-first order, and adds up: exact for losses that are sums over
                sequences. ``batch`` calls it once, on all sequences in input order:
                exact for any loss, for one more forward.
            router_weights: per sequence, the factor with which its router's auxiliary
                loss is added (routers/aux_loss.py); all tokens are computed then. None:
                there is none.

        Raises:
            ValueError: the model has no such loss, and as ``forward_backward``.
        """
        check_model_supported(self.model, training=True)
        self.last_samples = []
        needed = self._needed(tree, positions)
        trained = needed
        if router_weights is not None:
            trained = needed.with_all_tokens(tree)
        if scope == "sequence":
            return self._traverse(
                tree, trained, True, group_loss, router_weights=router_weights
            ).read_loss()
        if scope != "batch":
            raise ValueError(f"scope={scope!r}; expected sequence or batch")
        # One pass for the outputs, the loss on all of them, one pass for its gradients.
        first = self._traverse(tree, needed, training=False)
        if tree.num_sequences:
            with torch.enable_grad():
                first.inject(group_loss, list(range(tree.num_sequences)))
        self._traverse(
            tree, trained, True, injected=first, router_weights=router_weights
        )
        assert self.last_stats is not None
        return first.read_loss() + self.last_stats.router_loss

    def traverse(
        self, tree: PrefixTree, sequence_loss: Callable[..., Tensor], watch: BlockWatch
    ) -> Traversal:
        """Do what ``forward_backward`` does while ``watch`` looks on; for checks."""
        check_model_supported(self.model, training=True)
        needed = self._needed(tree, None)
        return self._traverse(tree, needed, True, _summed(sequence_loss), watch=watch)

    @contextmanager
    def head_without_gradient(self) -> Iterator[None]:
        """Context manager in which the vocabulary's projection gets no gradient."""
        head = self._head
        head.trains = False
        try:
            yield
        finally:
            head.trains = True

    def _traverse(
        self,
        tree: PrefixTree,
        needed: NeededOutputs,
        training: bool,
        loss: GroupLoss | None = None,
        injected: Traversal | None = None,
        watch: BlockWatch | None = None,
        router_weights: Sequence[float] | None = None,
    ) -> Traversal:
        """Walk the tree once; with the gradients that ``injected`` holds, if given."""
        check_no_autocast(self.model)
        self._check_tokens(tree)
        config = self.config
        schedule = build_schedule(
            tree,
            config.block_tokens,
            config.retain_tokens,
            training,
            needed,
            config.fragments,
            self._partial_graph(),
            # layers with a state do more between their modules than attention does
            only_parts=config.recompute == "mlp" and not stateful_layers(self.model),
        )
        calls_model = bool(schedule.steps) or self.pace.calls_when_empty
        if calls_model:
            self.profile(training and self.model.training)
        stateful = stateful_layers(self.model)
        traversal = Traversal(
            self.model,
            self._head,
            config,
            tree,
            schedule,
            loss,
            self.pace,
            self.layers,
            watch,
            self._last_layer,
            router_weights,
            stateful,
        )
        if injected is not None:
            traversal.channels = injected.channels
        timer = BlockTimer(next(self.model.parameters()).device)
        with torch.set_grad_enabled(training):
            if calls_model:
                with (
                    model_attention(self.model),
                    on_trees(stateful),
                    nullcontext() if self.fused is None else self.fused.active(),
                    self.pace.traversal(schedule, lambda: self._idle_call(stateful)),
                ):
                    self._walk(traversal, timer, schedule)
            traversal.finish()
        if not self.pace.waits_for_others:
            self.last_samples += timer.samples(tree, schedule)
        self.last_schedule = schedule
        self.last_stats = ExecutionStats.of(tree, schedule)
        if traversal.router_load is not None:
            load = traversal.router_load.counts
            self.last_stats = dataclasses.replace(self.last_stats, expert_load=load)
        if traversal.router_loss is not None:
            value = traversal.router_loss.value
            self.last_stats = dataclasses.replace(self.last_stats, router_loss=value)
        return traversal

    def _walk(
        self, traversal: Traversal, timer: BlockTimer, schedule: Schedule
    ) -> None:
        try:
            for step in schedule.steps:
                with timer.step():
                    if step.kind is StepKind.ENTER:
                        traversal.enter(step)
                    else:
                        traversal.exit(step)
        except Exception:
            self.retained_at_failure = traversal.num_retained
            raise

    def _partial_graph(self) -> PartialGraph | None:
        """Return what graphs without MLPs take, if some may be kept beside others."""
        if self.config.recompute != "auto" or stateful_layers(self.model):
            return None
        sizes = self.model.config.get_text_config()
        return partial_graph(sizes, next(self.model.parameters()).element_size())

    def _needed(self, tree: PrefixTree, positions: Positions | None) -> NeededOutputs:
        if self.outputs == "values":
            return NeededOutputs.values_at(tree, positions)
        return (
            NeededOutputs.all(tree)
            if positions is None
            else NeededOutputs.logprobs_at(tree, positions)
        )

    def fuse(self) -> FusedLayers:
        """Find the layers that have fused kernels, once: at the first call.

        Raises:
            ValueError: ``fused_layers=on`` is not possible; names what stands against.
        """
        if self.fused is None:
            self.fused = FusedLayers(self.model, self.config.fused_layers)
        return self.fused

    def profile(self, find_randomness: bool) -> None:
        """Learn what the layers ask of attention, once: at the first call."""
        if self._is_profiled and (self._knows_randomness or not find_randomness):
            return
        self.fuse()
        with self.pace.together():
            self.layers = profile_attention(self.model, find_randomness)
            if not self._knows_last_layer:
                self._find_last_layer()
        self._is_profiled, self._knows_randomness = True, find_randomness

    def _find_last_layer(self) -> None:
        """Learn whether the last layer can run at needed outputs only."""

        def outputs(last_layer: LastLayer | None) -> list[Tensor]:
            return probe_outputs(
                self.model,
                self._head,
                self.config.kernel,
                self.layers,
                stateful,
                last_layer,
            )

        stateful = stateful_layers(self.model)
        num_layers = self.model.config.get_text_config().num_hidden_layers
        with torch.no_grad(), model_attention(self.model), on_trees(stateful):
            self._last_layer = find_last_layer(self.model, num_layers, outputs)
        self._knows_last_layer = True

    def _check_tokens(self, tree: PrefixTree) -> None:
        """Refuse tokens without an embedding.

        Raises:
            ValueError: names the sequence, the token and the size of the vocabulary.
        """
        embeddings = self.model.get_input_embeddings()
        vocab_size = getattr(embeddings, "num_embeddings", None)
        vocab_size = vocab_size or self.model.config.get_text_config().vocab_size
        if not tree.nodes:
            return
        tokens = np.concatenate([node.tokens for node in tree.nodes])
        if tokens.min() >= 0 and tokens.max() < vocab_size:
            return
        for node in tree.nodes:
            wrong = node.tokens[(node.tokens < 0) | (node.tokens >= vocab_size)]
            if len(wrong):
                below = node
                while not below.sequences:
                    below = tree.nodes[below.children[0]]
                raise ValueError(
                    f"sequence {min(below.sequences)} has token id {wrong[0]}; "
                    f"expected 0 to {vocab_size - 1}, the vocabulary of the model"
                )

    def _idle_call(self, stateful: Sequence[StatefulLayer]) -> list[Tensor]:
        return idle_outputs(
            self.model, self._head, self.config.kernel, self.layers, stateful
        )


def _summed(sequence_loss: Callable[..., Tensor]) -> GroupLoss:
    def group_loss(indices: list[int], *outputs: list[Tensor]) -> Tensor:
        losses = map(sequence_loss, indices, *outputs)
        return torch.stack([as_scalar(loss) for loss in losses]).sum()

    return group_loss
