"""One depth-first pass over a tree: its two steps (enter, exit) and its state.

Enter runs a fragment that others hang on and keeps the K/V of its trunk. Exit takes a
fragment backward with all that its branches injected, and drops it. A fragment without
children has an exit only. Open fragments form a stack: the path from the root.

Invariants, and the tests that hold them (tests/executor):
  * a loss reaches each sequence exactly once: test_parity.py
  * a gradient at an output that was not computed raises: test_needed_outputs.py
  * graphs and K/V are gone after the exit: test_memory.py
"""

# T = tree tokens, E = edges, R = rows

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.attention import LayerAttention
from areal_dta.executor.block import BlockOutput, BlockRunner, BlockWatch, Pace
from areal_dta.executor.block_layout import TreeTensors
from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.kernels import accumulation_dtype
from areal_dta.executor.kv_cache import PathCache, TrunkCache
from areal_dta.executor.outputs import Channel, OutputHead
from areal_dta.executor.telemetry import RouterLoad
from areal_dta.schedule import Fragment, Schedule, Step
from areal_dta.tree import PrefixTree

GroupLoss = Callable[..., Tensor]
"""(indices, one list of tensors per channel) -> scalar tensor, the loss of some
sequences together."""


class ChannelState:
    """Values of one channel and the gradients injected into them, per tree token.

    4 bytes per tree token each: small beside one layer's K/V, so not path-bound.
    """

    def __init__(
        self, channel: Channel, is_needed_T: Tensor, needs_all: bool, dtype: torch.dtype
    ) -> None:
        self.channel = channel
        self.value_T = torch.zeros(
            len(is_needed_T), dtype=dtype, device=is_needed_T.device
        )
        self.grad_T = torch.zeros_like(self.value_T)
        self.has_grad = False
        self._is_needed_T, self._needs_all = is_needed_T, needs_all

    def inject(self, sequence: int, token_indices: Tensor, grad: Tensor) -> None:
        """Add the gradient of a sequence's loss.

        Raises:
            ValueError: it is not zero at an output that was skipped.
        """
        index = token_indices[self.channel.span]
        if not self._needs_all:
            wrong = torch.nonzero(~self._is_needed_T[index] & (grad != 0)).flatten()
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
        """The segment at which the loaded path ends."""


class Traversal:
    """State of one depth-first pass: the channels, the path, the open fragments.

    Args:
        loss: evaluated at the exit of each fragment on the sequences that end there;
            None injects nothing by itself (see ``inject``).
        pace: when the model may be called.
        layers: what each layer asks of its attention.
        watch: looks on while blocks run.
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
        layers: Mapping[int, LayerAttention] | None = None,
        watch: BlockWatch | None = None,
    ) -> None:
        self._tree, self._schedule, self._loss = tree, schedule, loss
        self._pace = pace or Pace()
        self._cut = cut = schedule.cut
        parameter = next(model.parameters())
        self._device = parameter.device
        num_layers = model.config.get_text_config().num_hidden_layers
        capacity = max((f.path_tokens for f in cut.fragments), default=0)
        self._path = PathCache(num_layers, capacity, with_grad=schedule.training)
        self.router_load = RouterLoad(model, tree) if config.router_load else None
        self._watch = watch or self.router_load
        tensors = TreeTensors.of(tree, cut, self._device)
        self._runner = BlockRunner(
            model, head, tensors, self._path, config.kernel, layers or {}, self._watch
        )
        self._open: list[_OpenFragment] = []
        needed, dtype = cut.needed, accumulation_dtype(parameter.dtype)
        self.channels = [
            ChannelState(
                channel,
                self._on_device(needed.edge_T if channel.on_edges else needed.output_T),
                needed.is_all,
                dtype,
            )
            for channel in head.channels
        ]
        self.total_loss = 0.0

    def enter(self, step: Step) -> None:
        """Run a fragment that others hang on; keep the K/V of its trunk."""
        fragment = self._cut.fragments[step.fragment]
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
        """Take a fragment backward with all that its branches injected; drop it."""
        fragment = self._cut.fragments[step.fragment]
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
        """Evaluate the losses of sequences of which nothing is computed."""
        unread = list(self._cut.unread_sequences)
        if self._loss is not None and unread:
            self.inject(self._loss, unread)

    def outputs(self, sequence: int) -> list[Tensor]:
        """Return a sequence's part of each channel."""
        index = self._token_indices(sequence)
        return [c.value_T[index[c.channel.span]] for c in self.channels]

    def inject(self, loss: GroupLoss, sequences: list[int]) -> None:
        """Evaluate a loss on detached values and file its gradients."""
        leaves = [[x.requires_grad_() for x in self.outputs(s)] for s in sequences]
        value = as_scalar(loss(sequences, *map(list, zip(*leaves, strict=True))))
        self.total_loss += float(value.detach())
        if not value.requires_grad:  # a constant: nothing to learn from
            return
        flat = [leaf for of_sequence in leaves for leaf in of_sequence]
        grads = iter(torch.autograd.grad(value, flat, allow_unused=True))
        for sequence in sequences:
            index = self._token_indices(sequence)
            for channel in self.channels:
                grad = next(grads)
                if grad is not None:
                    channel.inject(sequence, index, grad)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _token_indices(self, sequence: int) -> Tensor:
        return self._on_device(self._tree.token_indices(sequence))

    def _attach(self, fragment: Fragment) -> None:
        """Make the path buffer end at the segment that ``fragment`` hangs on."""
        if not self._open or self._open[-1].attached == fragment.attach:
            return
        parent = self._open[-1]
        positions = [
            parent.trunk_at[s] + np.arange(self._cut.segments[s].num_tokens)
            for s in self._cut.chain(fragment.attach, fragment.parent)
        ]
        parent.trunk.load(self._on_device(np.concatenate(positions)))
        parent.attached = fragment.attach

    def _trunk_positions(
        self, fragment: Fragment, block: BlockOutput
    ) -> tuple[dict[int, int], Tensor]:
        """Where each trunk segment lies in the trunk, and the trunk in the block."""
        trunk_at: dict[int, int] = {}
        positions: list[np.ndarray] = []
        size = 0
        for s in fragment.trunk:
            num_tokens = self._cut.segments[s].num_tokens
            trunk_at[s] = size
            positions.append(block.layout.offsets[s] + np.arange(num_tokens))
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
        # Gradients of the losses. A channel that is only reported, as entropies mostly
        # are, has none and costs nothing.
        for channel, output in zip(self.channels, block.outputs, strict=True):
            if output.numel() and channel.has_grad and output.requires_grad:
                roots.append(output)
                grads.append(channel.grad_T[self._filed_under(channel, block)])
        # Gradients that the branches sent to keys and values of the trunk.
        if opened is not None:
            _, positions = self._trunk_positions(fragment, block)
            kv = [*block.keys, *block.values]
            kv_grads = [*opened.trunk.grad_k, *opened.trunk.grad_v]
            for root, grad in zip(kv, kv_grads, strict=True):
                # Nothing below the first trainable parameter has a graph.
                if not root.requires_grad:
                    continue
                roots.append(root)
                spread = torch.zeros_like(root)
                grads.append(spread.index_copy_(2, positions, grad.to(root.dtype)))
        inputs = self._watch.inputs if self._watch is not None else None
        self._pace.backward(roots, grads, inputs)


def as_scalar(loss: Tensor) -> Tensor:
    """Return a loss of shape [].

    Raises:
        ValueError: the loss is not a tensor with one element.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss returned {got}; expected a scalar tensor")
    return loss.reshape(())
