"""Depth-first execution of a prefix tree: every token once, gradients exact.

Method: arXiv 2602.00482, section 3, over fragments instead of single nodes. Losses are
evaluated on detached values and their gradients injected: logprobs per edge, entropies
per position, keys and values per path token. A fragment's backward starts from all
that was injected into it, so the sum over all branches through it is exact, and each
branch's graph is freed as soon as it is done.

Invariants, and the tests that hold them (tests/executor):
  * gradients equal one-sequence-at-a-time training: test_parity.py
  * the same for any block and retain budget, child order and batch order: the same
  * memory follows the longest path, not the number of branches: test_memory.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.attention import tree_attention
from areal_dta.executor.backends import accumulation_dtype
from areal_dta.executor.block import BlockOutput, BlockRunner, TreeTensors
from areal_dta.executor.config import ExecutionStats, ExecutorConfig
from areal_dta.executor.head_capture import HeadCapture
from areal_dta.executor.model_support import check_model_supported
from areal_dta.executor.path_cache import PathCache, TrunkCache
from areal_dta.executor.reference import SequenceLoss, SequenceOutput
from areal_dta.plan import (
    Fragment,
    Reads,
    Schedule,
    Step,
    StepKind,
    build_schedule,
)
from areal_dta.tree import PrefixTree

GroupLoss = Callable[[list[int], list[Tensor], list[Tensor]], Tensor]
"""(indices, logprobs, entropies of each) -> scalar tensor: the loss of the sequences
that end in one block, together."""
Positions = Sequence[np.ndarray]
"""Per sequence a mask [len-1], true where entry t of its outputs is read."""


class TreeExecutor:
    """Runs prefix trees through a Hugging Face causal language model.

    Between calls the model is untouched: its attention is replaced during a call only.

    Raises:
        UnsupportedModelError: the model cannot be split at a prefix.
    """

    def __init__(
        self, model: PreTrainedModel, config: ExecutorConfig | None = None
    ) -> None:
        self.model = model
        self.config = config or ExecutorConfig()
        self.last_stats: ExecutionStats | None = None
        self.last_schedule: Schedule | None = None
        check_model_supported(model, training=False)
        self._head = HeadCapture(model)

    def forward(
        self, tree: PrefixTree, positions: Positions | None = None
    ) -> list[SequenceOutput]:
        """Logprobs and entropies of every sequence, in input order, no gradients.

        With ``positions`` only what they name is computed; the rest is 0.
        """
        with torch.no_grad():
            traversal = self._traverse(tree, None, positions)
        return [traversal.output(i) for i in range(tree.num_sequences)]

    def forward_backward(
        self,
        tree: PrefixTree,
        sequence_loss: SequenceLoss,
        positions: Positions | None = None,
    ) -> float:
        """Sum of ``sequence_loss`` over the sequences; gradients accumulate.

        ``sequence_loss(index, logprobs, entropy)`` gets detached values that require
        grad, [len-1] each, and returns a scalar. Both arguments carry gradients. With
        ``positions`` only what they name is computed, the rest is 0 and must not
        be learned from.

        Raises:
            UnsupportedModelError: the model, as it is set now, cannot be trained.
            ValueError: a loss is not a scalar tensor, or has a gradient at a position
                that was skipped.
        """

        def group_loss(
            indices: list[int], logprobs: list[Tensor], entropies: list[Tensor]
        ) -> Tensor:
            losses = map(sequence_loss, indices, logprobs, entropies)
            return torch.stack([_scalar(loss) for loss in losses]).sum()

        return self.forward_backward_groups(tree, group_loss, positions)

    def forward_backward_groups(
        self,
        tree: PrefixTree,
        group_loss: GroupLoss,
        positions: Positions | None = None,
    ) -> float:
        """As ``forward_backward``, the sequences that end in one block together.

        ``group_loss`` is called once for each block in which sequences end, in
        depth-first order; the results are added up.
        """
        check_model_supported(self.model, training=True)
        with torch.enable_grad():
            return self._traverse(tree, group_loss, positions).total_loss

    def _traverse(
        self,
        tree: PrefixTree,
        loss: GroupLoss | None,
        positions: Positions | None,
    ) -> _Traversal:
        config = self.config
        schedule = build_schedule(
            tree,
            config.block_tokens,
            config.retain_tokens,
            training=loss is not None,
            reads=None if positions is None else Reads.at(tree, positions),
            fragments=config.fragments,
        )
        traversal = _Traversal(self.model, config, self._head, tree, schedule, loss)
        if schedule.steps:
            with tree_attention(self.model):
                for step in schedule.steps:
                    if step.kind is StepKind.ENTER:
                        traversal.enter(step)
                    else:
                        traversal.exit(step)
        traversal.finish()
        self.last_schedule = schedule
        self.last_stats = ExecutionStats.of(tree, schedule)
        return traversal


class _OpenFragment:
    """A fragment between its enter and its exit."""

    def __init__(
        self, block: BlockOutput, trunk: TrunkCache, trunk_at: dict[int, int]
    ) -> None:
        self.block: BlockOutput | None = block
        self.trunk = trunk
        self.trunk_at = trunk_at  # segment -> its first position in the trunk
        self.attached = -1


class _Traversal:
    """State of one depth-first pass: values and gradients of all edges and positions,
    the path, and the open fragments (a stack)."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExecutorConfig,
        head: HeadCapture,
        tree: PrefixTree,
        schedule: Schedule,
        loss: GroupLoss | None,
    ) -> None:
        self._loss = loss
        self._tree, self._schedule = tree, schedule
        fragments = schedule.cut.fragments
        parameter = next(model.parameters())
        self._device = parameter.device
        num_layers = model.config.get_text_config().num_hidden_layers
        capacity = max((f.path_tokens for f in fragments), default=0)
        self._path = PathCache(num_layers, capacity, with_grad=loss is not None)
        tensors = TreeTensors.of(tree, schedule.cut, self._device)
        self._runner = BlockRunner(model, config, head, tensors, self._path)
        self._open: list[_OpenFragment] = []
        # 4 bytes a tree token each: small beside one layer's K/V, so not path-bound.
        # A logprob is filed under the token that it predicts, an entropy under the
        # token whose position it belongs to.
        acc = accumulation_dtype(parameter.dtype)
        size, device = tree.num_tree_tokens, self._device
        self._logprob = torch.zeros(size, dtype=acc, device=device)
        self._entropy = torch.zeros_like(self._logprob)
        self._grad_logprob = torch.zeros_like(self._logprob)
        self._grad_entropy = torch.zeros_like(self._logprob)
        self._edge_is_read = torch.from_numpy(schedule.cut.reads.edge_T).to(device)
        self._row_is_read = torch.from_numpy(schedule.cut.reads.row_T).to(device)
        self._reads_all = bool(schedule.cut.reads.edge_T.sum() == _num_edges(tree))
        self._entropy_has_grad = False
        self.total_loss = 0.0

    def enter(self, step: Step) -> None:
        """Forward of a fragment that others hang on; its trunk's K/V are kept."""
        fragment = self._schedule.cut.fragments[step.fragment]
        self._attach(fragment)
        block = self._run(fragment, step.computes, step.with_grad, keep_kv=True)
        trunk_at, positions = self._trunk_positions(fragment, block)
        trunk = TrunkCache(
            self._path,
            fragment.path_tokens,
            [k.detach().index_select(2, positions) for k in block.keys],
            [v.detach().index_select(2, positions) for v in block.values],
        )
        opened = _OpenFragment(block, trunk, trunk_at)
        if not step.with_grad:
            opened.block = None
        self._open.append(opened)

    def exit(self, step: Step) -> None:
        """Backward of a fragment with all that its branches injected, then drop it."""
        fragment = self._schedule.cut.fragments[step.fragment]
        opened = self._open.pop() if fragment.children else None
        if opened is not None:
            opened.trunk.unload()
        block = opened.block if opened is not None else None
        if step.computes:
            if opened is None:
                self._attach(fragment)
            # K/V take part in the backward only if children sent gradients to them
            keep_kv = opened is not None
            block = self._run(fragment, step.computes, step.with_grad, keep_kv)
        if self._loss is None:
            return
        assert block is not None
        if fragment.sequences:
            self._inject_losses(self._loss, list(fragment.sequences))
        self._backward(fragment, block, opened)

    def finish(self) -> None:
        """The losses of sequences of which nothing is computed."""
        unread = list(self._schedule.cut.unread_sequences)
        if self._loss is not None and unread:
            self._inject_losses(self._loss, unread)

    def output(self, sequence: int) -> SequenceOutput:
        index = self._indices(sequence)
        return SequenceOutput(self._logprob[index[1:]], self._entropy[index[:-1]])

    def _indices(self, sequence: int) -> Tensor:
        indices = self._tree.token_indices(sequence)
        return torch.from_numpy(indices).to(self._device)

    def _attach(self, fragment: Fragment) -> None:
        """Have the path buffer end at the segment that ``fragment`` hangs on."""
        if not self._open:
            return
        parent = self._open[-1]
        if parent.attached != fragment.attach:
            cut = self._schedule.cut
            positions = np.concatenate(
                [
                    np.arange(at, at + cut.segments[s].num_tokens)
                    for s in cut.chain(fragment.attach, fragment.parent)
                    for at in (parent.trunk_at[s],)
                ]
            )
            parent.trunk.load(torch.from_numpy(positions).to(self._device))
            parent.attached = fragment.attach

    def _trunk_positions(
        self, fragment: Fragment, block: BlockOutput
    ) -> tuple[dict[int, int], Tensor]:
        """Where each trunk segment lies in the trunk, and the trunk in the block."""
        segments, offsets = self._schedule.cut.segments, block.layout.offsets
        trunk_at: dict[int, int] = {}
        positions: list[np.ndarray] = []
        size = 0
        for s in fragment.trunk:
            trunk_at[s] = size
            num_tokens = segments[s].num_tokens
            positions.append(np.arange(offsets[s], offsets[s] + num_tokens))
            size += num_tokens
        return trunk_at, torch.from_numpy(np.concatenate(positions)).to(self._device)

    def _run(
        self,
        fragment: Fragment,
        segments: Sequence[int],
        with_grad: bool,
        keep_kv: bool,
    ) -> BlockOutput:
        with torch.set_grad_enabled(with_grad):
            block = self._runner.run(fragment.path_tokens, segments, keep_kv)
        edges = torch.from_numpy(block.layout.edge_token_E).to(self._device)
        self._logprob[edges] = block.logprob_E.detach()
        self._entropy[self._row_tokens(block)] = block.entropy_R.detach()
        return block

    def _row_tokens(self, block: BlockOutput) -> Tensor:
        layout = block.layout
        return torch.from_numpy(layout.token_S[layout.row_R]).to(self._device)

    def _inject_losses(self, loss: GroupLoss, sequences: list[int]) -> None:
        """Evaluate the loss of sequences that end here; file its gradients."""
        indices = [self._indices(s) for s in sequences]
        logprobs = [self._logprob[i[1:]].requires_grad_() for i in indices]
        entropies = [self._entropy[i[:-1]].requires_grad_() for i in indices]
        value = _scalar(loss(sequences, logprobs, entropies))
        self.total_loss += float(value.detach())
        if not value.requires_grad:  # a constant: nothing to learn from
            return
        leaves = [*logprobs, *entropies]
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        for n, index in enumerate(indices):
            grad_logprob, grad_entropy = grads[n], grads[len(indices) + n]
            if grad_logprob is not None:
                self._refuse_skipped(
                    sequences[n], self._edge_is_read[index[1:]], grad_logprob
                )
                self._grad_logprob.index_add_(0, index[1:], grad_logprob)
            if grad_entropy is not None:
                self._refuse_skipped(
                    sequences[n], self._row_is_read[index[:-1]], grad_entropy
                )
                self._grad_entropy.index_add_(0, index[:-1], grad_entropy)
                self._entropy_has_grad = True

    def _refuse_skipped(self, sequence: int, is_read: Tensor, grad: Tensor) -> None:
        if self._reads_all:
            return
        wrong = torch.nonzero(~is_read & (grad != 0)).flatten()
        if len(wrong):
            raise ValueError(
                f"the loss of sequence {sequence} has a gradient at skipped positions "
                f"{wrong[:5].tolist()}; expected none: pass positions that cover what "
                "the loss reads (positions=all in the configuration)"
            )

    def _backward(
        self, fragment: Fragment, block: BlockOutput, opened: _OpenFragment | None
    ) -> None:
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        if block.logprob_E.numel():
            edges = torch.from_numpy(block.layout.edge_token_E).to(self._device)
            roots.append(block.logprob_E)
            grads.append(self._grad_logprob[edges])
            if self._entropy_has_grad:  # most losses only report the entropy
                roots.append(block.entropy_R)
                grads.append(self._grad_entropy[self._row_tokens(block)])
        if opened is not None:
            _, positions = self._trunk_positions(fragment, block)
            trunk = opened.trunk
            for root, grad in zip(
                [*block.keys, *block.values],
                [*trunk.grad_k, *trunk.grad_v],
                strict=True,
            ):
                roots.append(root)
                spread = torch.zeros_like(root)
                grads.append(spread.index_copy_(2, positions, grad.to(root.dtype)))
        if roots:
            torch.autograd.backward(roots, grads)


def _num_edges(tree: PrefixTree) -> int:
    return tree.num_tree_tokens - sum(1 for node in tree.nodes if node.parent < 0)


def _scalar(loss: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss returned {got}; expected a scalar tensor")
    return loss.reshape(())
