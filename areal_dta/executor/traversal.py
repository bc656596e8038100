"""State of one depth-first pass over a tree: the two steps, enter and exit."""

# T = tree tokens, E = edges, R = rows

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.block import BlockOutput, BlockRunner, FreePace, Pace
from areal_dta.executor.block_layout import TreeTensors
from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.kernels import accumulation_dtype
from areal_dta.executor.kv_cache import PathCache, TrunkCache
from areal_dta.executor.outputs import Channel, OutputHead
from areal_dta.executor.telemetry import RouterLoad
from areal_dta.schedule import Fragment, Schedule, Step
from areal_dta.tree import PrefixTree

GroupLoss = Callable[..., Tensor]
"""(indices, one list of tensors a channel) -> scalar tensor: the loss of some
sequences, together."""


class ChannelState:
    """Values of one channel and the gradients injected into them, by tree token.

    4 bytes a tree token each: small beside one layer's K/V, so not path-bound.
    """

    def __init__(
        self, channel: Channel, is_read_T: Tensor, needs_all: bool, dtype: torch.dtype
    ) -> None:
        self.channel = channel
        self.value_T = torch.zeros(len(is_read_T), dtype=dtype, device=is_read_T.device)
        self.grad_T = torch.zeros_like(self.value_T)
        self.has_grad = False
        self._is_read_T, self._reads_all = is_read_T, needs_all

    def of(self, token_indices: Tensor) -> Tensor:
        """A sequence's part of the channel."""
        return self.value_T[token_indices[self.channel.span]]

    def inject(self, sequence: int, token_indices: Tensor, grad: Tensor) -> None:
        """Add the gradient of a sequence's loss.

        Raises:
            ValueError: it is not zero at a position that was skipped.
        """
        index = token_indices[self.channel.span]
        if not self._reads_all:
            wrong = torch.nonzero(~self._is_read_T[index] & (grad != 0)).flatten()
            if len(wrong):
                raise ValueError(
                    f"the loss of sequence {sequence} has a gradient at skipped "
                    f"positions {wrong[:5].tolist()} of {self.channel.name}; expected "
                    "none: pass positions that cover what the loss reads "
                    "(positions=all in the configuration)"
                )
        self.grad_T.index_add_(0, index, grad.to(self.grad_T.dtype))
        self.has_grad = True


class _OpenFragment:
    """A fragment between its enter and its exit."""

    def __init__(
        self, block: BlockOutput | None, trunk: TrunkCache, trunk_at: dict[int, int]
    ) -> None:
        self.block = block
        """Its live graph; None if it is run again at exit."""
        self.trunk = trunk
        self.trunk_at = trunk_at
        """Segment -> its first position in the trunk."""
        self.attached = -1
        """The segment whose path is loaded now."""


class Traversal:
    """One depth-first pass: the channels, the path, and the open fragments (a stack).

    Args:
        loss: evaluated at the exit of each fragment on the sequences that end there;
            None injects nothing by itself (see ``inject``).
        pace: when the model may be called.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: OutputHead,
        config: ExecutorConfig,
        tree: PrefixTree,
        schedule: Schedule,
        loss: GroupLoss | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._tree, self._schedule, self._loss = tree, schedule, loss
        self._pace: Pace = pace or FreePace()
        cut = schedule.cut
        parameter = next(model.parameters())
        self._device = parameter.device
        num_layers = model.config.get_text_config().num_hidden_layers
        capacity = max((f.path_tokens for f in cut.fragments), default=0)
        self._path = PathCache(num_layers, capacity, with_grad=schedule.training)
        self.router_load = RouterLoad(model, tree) if config.router_load else None
        self._runner = BlockRunner(
            model,
            head,
            TreeTensors.of(tree, cut, self._device),
            self._path,
            config.kernel,
            self.router_load,
        )
        self._open: list[_OpenFragment] = []
        read_T = {
            True: self._on_device(cut.needed.edge_T),
            False: self._on_device(cut.needed.output_T),
        }
        self.channels = [
            ChannelState(
                channel,
                read_T[channel.on_edges],
                needs_all=cut.needed.is_all,
                dtype=accumulation_dtype(parameter.dtype),
            )
            for channel in head.channels
        ]
        self.total_loss = 0.0

    def enter(self, step: Step) -> None:
        """Forward of a fragment that others hang on; its trunk's K/V are kept."""
        fragment = self._schedule.cut.fragments[step.fragment]
        self._attach(fragment)
        block = self._run(fragment, step, keep_kv=True)
        trunk_at, positions = self._trunk_positions(fragment, block)
        trunk = TrunkCache(
            self._path,
            fragment.path_tokens,
            [k.detach().index_select(2, positions) for k in block.keys],
            [v.detach().index_select(2, positions) for v in block.values],
        )
        live = block if step.with_grad else None
        self._open.append(_OpenFragment(live, trunk, trunk_at))

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
            block = self._run(fragment, step, keep_kv=opened is not None)
        if not self._schedule.training:
            return
        assert block is not None
        if self._loss is not None and fragment.sequences:
            self.inject(self._loss, list(fragment.sequences))
        self._backward(fragment, block, opened)

    def finish(self) -> None:
        """The losses of sequences of which nothing is computed."""
        unread = list(self._schedule.cut.unread_sequences)
        if self._loss is not None and unread:
            self.inject(self._loss, unread)

    def outputs(self, sequence: int) -> list[Tensor]:
        """A sequence's part of each channel."""
        index = self._token_indices(sequence)
        return [channel.of(index) for channel in self.channels]

    def inject(self, loss: GroupLoss, sequences: list[int]) -> None:
        """Evaluate a loss on detached values and file its gradients."""
        indices = [self._token_indices(s) for s in sequences]
        leaves = [[c.of(i).requires_grad_() for i in indices] for c in self.channels]
        value = as_scalar(loss(sequences, *leaves))
        self.total_loss += float(value.detach())
        if not value.requires_grad:  # a constant: nothing to learn from
            return
        flat = [leaf for channel in leaves for leaf in channel]
        grads = iter(torch.autograd.grad(value, flat, allow_unused=True))
        for channel in self.channels:
            for sequence, index in zip(sequences, indices, strict=True):
                grad = next(grads)
                if grad is not None:
                    channel.inject(sequence, index, grad)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _token_indices(self, sequence: int) -> Tensor:
        return self._on_device(self._tree.token_indices(sequence))

    def _attach(self, fragment: Fragment) -> None:
        """Have the path buffer end at the segment that ``fragment`` hangs on."""
        if not self._open:
            return
        parent = self._open[-1]
        if parent.attached == fragment.attach:
            return
        cut = self._schedule.cut
        positions = [
            np.arange(
                parent.trunk_at[s], parent.trunk_at[s] + cut.segments[s].num_tokens
            )
            for s in cut.chain(fragment.attach, fragment.parent)
        ]
        parent.trunk.load(self._on_device(np.concatenate(positions)))
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
        return trunk_at, self._on_device(np.concatenate(positions))

    def _run(self, fragment: Fragment, step: Step, keep_kv: bool) -> BlockOutput:
        with torch.set_grad_enabled(step.with_grad), self._pace.forward():
            block = self._runner.run(fragment.path_tokens, step.computes, keep_kv)
        for channel, output in zip(self.channels, block.outputs, strict=True):
            channel.value_T[self._filed_under(channel, block)] = output.detach()
        return block

    def _filed_under(self, channel: ChannelState, block: BlockOutput) -> Tensor:
        layout = block.layout
        if channel.channel.on_edges:
            return self._on_device(layout.edge_token_E)
        return self._on_device(layout.token_S[layout.row_R])

    def _backward(
        self, fragment: Fragment, block: BlockOutput, opened: _OpenFragment | None
    ) -> None:
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        for channel, output in zip(self.channels, block.outputs, strict=True):
            # a channel that is only reported, as entropies mostly are, costs nothing
            if output.numel() and channel.has_grad:
                roots.append(output)
                grads.append(channel.grad_T[self._filed_under(channel, block)])
        if opened is not None:
            _, positions = self._trunk_positions(fragment, block)
            trunk = opened.trunk
            kv = [*block.keys, *block.values]
            kv_grads = [*trunk.grad_k, *trunk.grad_v]
            for root, grad in zip(kv, kv_grads, strict=True):
                roots.append(root)
                spread = torch.zeros_like(root)
                grads.append(spread.index_copy_(2, positions, grad.to(root.dtype)))
        self._pace.backward(roots, grads)


def as_scalar(loss: Tensor) -> Tensor:
    """Check what a loss returned.

    Raises:
        ValueError: it is not a tensor with one number.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss returned {got}; expected a scalar tensor")
    return loss.reshape(())
