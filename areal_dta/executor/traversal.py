"""One depth-first pass over a tree: its two steps (enter, exit) and its state.

Enter runs a fragment that others hang on and keeps K/V and states of its trunk. Exit
takes a fragment backward with all that its branches injected, and drops it. A fragment
without children has an exit only. Open fragments form a stack: the path from the root.

Invariants, and the tests that hold them (tests/executor):
  * a loss reaches each sequence exactly once: test_parity.py
  * a gradient at an output that was not computed raises: test_needed_outputs.py
  * graphs and K/V are gone after the exit: test_memory.py
  * on a GPU the host waits for nothing, and copies at most twice per tree: all index
    arrays before the first block, and the weights of a router: test_cuda_calls.py
"""

# T = tree tokens, E = edges, R = rows

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.attention import LayerAttention
from areal_dta.executor.block import (
    BlockOutput,
    BlockRunner,
    BlockWatch,
    Pace,
)
from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.kernels import KERNELS, accumulation_dtype
from areal_dta.executor.kv_cache import (
    PathCache,
    Positions,
    TrunkCache,
    spread,
    trunk_part,
)
from areal_dta.executor.last_layer import LastLayer
from areal_dta.executor.layout.block_layout import exit_segments
from areal_dta.executor.layout.tree_arrays import TreeArrays
from areal_dta.executor.memory.recompute import PartRecompute
from areal_dta.executor.outputs import Channel, OutputHead
from areal_dta.executor.routers import RouterAuxLoss, RouterLoad
from areal_dta.executor.states.protocol import StatefulLayer
from areal_dta.executor.states.trunk_states import TrunkStates
from areal_dta.schedule import Fragment, Schedule, Step, StepKind
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

    def inject(self, token_indices: Tensor, grad: Tensor) -> None:
        """Add the gradient of a sequence's loss."""
        index = token_indices[self.channel.span]
        self.grad_T.index_add_(0, index, grad.to(self.grad_T.dtype))
        self.has_grad = True

    @property
    def is_wrong_T(self) -> Tensor | None:
        """Where an output that was skipped has a gradient; None: nowhere."""
        if self._needs_all or not self.has_grad:
            return None
        return ~self._is_needed_T & (self.grad_T != 0)


class _OpenFragment:
    """A fragment between its enter and its exit."""

    def __init__(
        self,
        block: BlockOutput | None,
        trunk: TrunkCache,
        states: TrunkStates,
        at: Positions,
        num_tokens: int,
    ) -> None:
        self.num_tokens = num_tokens
        self.at = at
        """Where the trunk lies in the block; that of the exit may hold more tokens."""
        self.block = block
        """Its live graph; None if it is run again at exit."""
        self.trunk, self.states = trunk, states
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
        stateful: the layers that carry a state.
        last_layer: run at needed outputs only; None: run whole.
        router_weights: per sequence, the factor of its router's auxiliary loss; None:
            there is none.
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
        last_layer: LastLayer | None = None,
        router_weights: Sequence[float] | None = None,
        stateful: Sequence[StatefulLayer] = (),
    ) -> None:
        self._tree, self._schedule, self._loss = tree, schedule, loss
        self._pace = pace or Pace()
        self._cut = cut = schedule.cut
        parameter = next(model.parameters())
        self._device = parameter.device
        self.router_load = RouterLoad(model, tree) if config.router_load else None
        self._watch = watch or self.router_load
        self.router_loss: RouterAuxLoss | None = None
        if router_weights is not None:
            self.router_loss = RouterAuxLoss(model, tree, router_weights, self._watch)
            self._watch = self.router_loss
        self._open: list[_OpenFragment] = []

        # The path, with room behind it for kernels that read path and block at once.
        capacity = max((f.path_tokens for f in cut.fragments), default=0)
        deepest = max((f.path_tokens + f.num_tokens for f in cut.fragments), default=0)
        kernel = KERNELS.get(config.kernel)
        joins = kernel.joins_chains if kernel else self._device.type == "cuda"
        room = deepest - capacity if joins else 0
        path = PathCache(layers or (), capacity, schedule.training, room)
        self._runner = BlockRunner(
            model,
            head,
            path,
            config.kernel,
            layers or {},
            self._watch,
            last_layer,
            stateful,
            PartRecompute(model) if any(s.keeps_part for s in schedule.steps) else None,
        )
        self._path = path

        needed, dtype = cut.needed, accumulation_dtype(parameter.dtype)
        masks = {
            c.name: needed.edge_T if c.on_edges else needed.output_T
            for c in head.channels
        }
        self._arrays = TreeArrays(
            tree, schedule, layers or {}, masks, self._device, stateful
        )
        self.channels = [
            ChannelState(
                channel, self._arrays.needed(channel.name), needed.is_all, dtype
            )
            for channel in head.channels
        ]
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)

    def enter(self, step: Step) -> None:
        """Run a fragment that others hang on; keep the K/V of its trunk."""
        fragment = self._cut.fragments[step.fragment]
        self._attach(fragment)
        block = self._run(fragment, step, keep_kv=True)
        at = self._arrays.trunk(step)
        k, v = (
            [trunk_part(x.detach(), at, step.with_grad) for x in of_layers]
            for of_layers in (block.keys, block.values)
        )
        trunk = TrunkCache(self._path, fragment.path_tokens, k, v)
        live = block if step.with_grad else None
        if live is None:
            self._arrays.drop(step.kind, step.fragment)
        segments = exit_segments(self._cut, fragment)
        children = [self._cut.fragments[child].attach for child in fragment.children]
        states = TrunkStates(block.leaving, segments, children)
        self._open.append(_OpenFragment(live, trunk, states, at, step.num_tokens))

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
            if opened is not None:
                opened.at = self._arrays.trunk(step)
        above = self._open[-1].states if self._open else None
        if not self._schedule.training:
            if above is not None:
                above.leave(fragment.attach, {})
            return
        assert block is not None
        if self._loss is not None and fragment.sequences:
            self.inject(self._loss, list(fragment.sequences))
        if self.router_loss is not None:
            self.router_loss.end(fragment.sequences)
        self._backward(block, opened)
        kind = StepKind.EXIT if step.computes else StepKind.ENTER
        self._arrays.drop(kind, step.fragment)
        if above is not None:
            above.leave(fragment.attach, block.entering)

    def finish(self) -> None:
        """Evaluate the losses of sequences of which nothing is computed."""
        unread = list(self._cut.unread_sequences)
        if self._loss is not None and unread:
            self.inject(self._loss, unread)

    def outputs(self, sequence: int) -> list[Tensor]:
        """Return a sequence's part of each channel."""
        index = self._arrays.token_indices(sequence)
        return [c.value_T[index[c.channel.span]] for c in self.channels]

    def inject(self, loss: GroupLoss, sequences: list[int]) -> None:
        """Evaluate a loss on detached values and file its gradients."""
        leaves = [[x.requires_grad_() for x in self.outputs(s)] for s in sequences]
        value = as_scalar(loss(sequences, *map(list, zip(*leaves, strict=True))))
        self._loss_sum += value.detach()
        if not value.requires_grad:  # a constant: nothing to learn from
            return
        flat = [leaf for of_sequence in leaves for leaf in of_sequence]
        grads = iter(torch.autograd.grad(value, flat, allow_unused=True))
        for sequence in sequences:
            index = self._arrays.token_indices(sequence)
            for channel in self.channels:
                grad = next(grads)
                if grad is not None:
                    channel.inject(index, grad)

    def read_loss(self) -> float:
        """Return the sum of all losses. Waits for the device: call it once, at the end.

        Raises:
            ValueError: a loss has a gradient at an output that was skipped.
        """
        wrong = [(c.channel, c.is_wrong_T) for c in self.channels]
        found = [(channel, x_T) for channel, x_T in wrong if x_T is not None]
        flags = [x_T.any().to(self._loss_sum.dtype) for _, x_T in found]
        total, *are_wrong = torch.stack([self._loss_sum, *flags]).tolist()
        for (channel, is_wrong_T), is_wrong in zip(found, are_wrong, strict=True):
            if is_wrong:
                self._refuse_gradient(channel, is_wrong_T)
        router_loss = 0.0 if self.router_loss is None else self.router_loss.value
        return float(total) + router_loss

    @property
    def num_retained(self) -> int:
        """Tokens whose graphs are kept for their exit."""
        return sum(o.num_tokens for o in self._open if o.block is not None)

    def _refuse_gradient(self, channel: Channel, is_wrong_T: Tensor) -> None:
        for sequence in range(self._tree.num_sequences):
            index = self._arrays.token_indices(sequence)[channel.span]
            if len(at := torch.nonzero(is_wrong_T[index]).flatten()):
                raise ValueError(
                    f"the loss has a gradient at skipped positions {at[:5].tolist()} "
                    f"of sequence {sequence} ({channel.name}); expected "
                    "none: pass positions that cover what the loss reads "
                    "(positions=all in the configuration)"
                )

    def _attach(self, fragment: Fragment) -> None:
        """Make the path buffer end at the segment that ``fragment`` hangs on."""
        if not self._open or self._open[-1].attached == fragment.attach:
            return
        parent = self._open[-1]
        positions = self._arrays.path(fragment)
        num_tokens = (
            fragment.path_tokens - self._cut.fragments[fragment.parent].path_tokens
        )
        parent.trunk.load(positions, num_tokens)
        parent.attached = fragment.attach

    def _run(self, fragment: Fragment, step: Step, keep_kv: bool) -> BlockOutput:
        layout, arrays = self._arrays.block(step)
        entering = None
        if self._open:
            entering = self._open[-1].states.enter(fragment.attach, step.with_grad)
        with torch.set_grad_enabled(step.with_grad), self._pace.forward():
            block = self._runner.run(
                fragment.path_tokens,
                layout,
                arrays,
                keep_kv,
                entering,
                step.keeps_part,
            )
        if self.router_loss is not None:
            block.router_logits = self.router_loss.take()
        for channel, output in zip(self.channels, block.outputs, strict=True):
            channel.value_T[self._filed_under(channel, block)] = output.detach()
        return block

    def _filed_under(self, channel: ChannelState, block: BlockOutput) -> Tensor:
        on_edges = channel.channel.on_edges
        return block.arrays["edge_token" if on_edges else "row_token"]

    def _backward(self, block: BlockOutput, opened: _OpenFragment | None) -> None:
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
            kv = [*block.keys, *block.values]
            kv_grads = [*opened.trunk.grad_k, *opened.trunk.grad_v]
            for root, grad in zip(kv, kv_grads, strict=True):
                # Nothing below the first trainable parameter has a graph.
                if not root.requires_grad:
                    continue
                roots.append(root)
                grads.append(spread(grad.to(root.dtype), opened.at, root))
            # And those to states at its ends.
            for state, grad in opened.states.grads.items():
                if block.leaving[state].requires_grad:
                    roots.append(block.leaving[state])
                    grads.append(grad.to(block.leaving[state].dtype))
        # Gradients of the routers' auxiliary loss.
        if self.router_loss is not None:
            logits = [x for x in block.router_logits if x.requires_grad]
            roots += logits
            grads += self.router_loss.gradients(block.arrays["token"], logits)
        inputs = self._watch.inputs if self._watch is not None else None
        if inputs is not None:
            inputs = [*inputs, *block.entering.values()]
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
