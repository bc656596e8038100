"""FSDP2 gathering per layer, in every block: all ranks make the same calls in order.

`fsdp_gather_step` gathers the whole model for a pass, which costs the unsharded
parameters and their unsharded gradients. Here FSDP2 does what it is made for: a layer
is gathered before its forward and its backward, resharded after, and its gradients are
reduce-scattered in every backward. A rank holds its shard, one layer, and the outermost
parameters (embedding, head).

All ranks must then run the same collectives in the same order although their trees
differ. So the ranks exchange their operations before a traversal and agree on rounds
(`schedule.rounds`): in a round all run a forward, or all run a backward, and a rank
that has none runs one of a single token and zero gradient.

A backward issues the same collectives whatever its roots, because:
  * The parameters of the outermost and of the last layer are gathered up front: a
    backward that starts from keys and values would miss the hooks on the last layer's
    output.
  * Nothing is prefetched: FSDP2 would prefetch by the order of the last forwards.
  * Parameters without a gradient get zeros; ranks would reduce different ones.

Invariants, and the tests that hold them (tests/engine/test_fsdp_gather_layer.py):
gradients equal those of one rank on all rows; at most two layers are gathered at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from areal_dta.areal_fixes.fsdp2 import (
    compute_dtype,
    drop_unreduced_gradients,
    forget_forward_order,
    group_bytes,
)
from areal_dta.engine.fsdp_gather_step import (
    PeerFailure,
    count_failures,
    raise_if_any_failed,
)
from areal_dta.executor.block import IdleCall, Pace
from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.memory.budget import usable_memory
from areal_dta.executor.memory.model_bytes import budgets_beside_whole_model
from areal_dta.schedule import Round, Schedule, merge_rounds, operations
from areal_dta.schedule.rounds import BACKWARD, FORWARD


class LayerwiseGather(Pace):
    """Pace of a model sharded by FSDP2.

    Args:
        model: wrapped by ``fully_shard``, as are its layers.
        group: a CPU group of all ranks.

    Raises:
        ValueError: fewer than two layers are wrapped.
    """

    calls_when_empty = True
    waits_for_others = True

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        if len(modules) < 3 or modules[0] is not model:
            raise ValueError(
                f"reshard=block needs a model with two layers at least, each wrapped "
                f"by FSDP; got {len(modules)} wrapped modules: use reshard=step"
            )
        self._model, self._group = model, group
        self._modules: list[Any] = modules
        # embeddings come before the layers
        self._outermost: list[Any] = [modules[0], modules[-1]]
        self._own_parameters = {id(m): _own_parameters(m) for m in modules}
        self._rounds: list[Round] = []
        self._next = 0
        self._idle_call: IdleCall | None = None
        self._idle_roots: list[Tensor] = []
        self._is_inside = False

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        """Context manager for any number of traversals. Collective.

        After an error between two calls of the model (in a loss) the other ranks raise
        too. An error inside a call, such as being out of memory, leaves them waiting
        until the time-out of their process group.

        Raises:
            PeerFailure: another rank failed; this one has dropped its gradients too.
        """
        with self._configured(), self._filling_gradients():
            try:
                yield
            except Exception:
                if not self._is_inside:
                    count_failures(self._group, failed=True)
                self._drop_gradients()
                raise
            try:
                raise_if_any_failed(self._group)
            except PeerFailure:
                self._drop_gradients()
                raise

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Context manager for any number of forward-only traversals. Collective."""
        with self._configured():
            yield

    @contextmanager
    def traversal(self, schedule: Schedule, idle_call: IdleCall) -> Iterator[None]:
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, operations(schedule), group=self._group)
        self._rounds = merge_rounds(everyone)
        self._next, self._idle_call = 0, idle_call
        if any(r.kind == BACKWARD for r in self._rounds):
            self._idle_roots = [t for t in self._idle_forward() if t.requires_grad]
        try:
            yield
        finally:
            if not self._is_inside:  # also after an error: the others go on
                while self._next < len(self._rounds):
                    self._idle(self._rounds[self._next])
            self._idle_roots, self._idle_call = [], None

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._wait_for(FORWARD)
        with self._inside():
            yield

    def backward(
        self,
        roots: Sequence[Tensor],
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        self._wait_for(BACKWARD)
        self._backward(roots, grads, inputs)

    def together(self) -> AbstractContextManager[None]:
        return self._inside()

    def _wait_for(self, kind: str) -> None:
        rank = dist.get_rank(self._group)
        while rank not in self._rounds[self._next].ranks:
            self._idle(self._rounds[self._next])
        assert self._rounds[self._next].kind == kind
        self._next += 1

    def _idle(self, round_: Round) -> None:
        self._next += 1
        if round_.kind == FORWARD:
            with torch.no_grad():
                self._idle_forward()
        else:
            self._backward([], [])

    def _idle_forward(self) -> Sequence[Tensor]:
        assert self._idle_call is not None
        with self._inside():
            return self._idle_call()

    def _backward(
        self,
        roots: Sequence[Tensor],
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        is_idle = not roots
        if is_idle:
            roots = self._idle_roots
            grads = [torch.zeros_like(root) for root in roots]
        if not roots:  # nothing is trainable, on any rank
            return
        with self._inside():
            for module in self._outermost:
                module.unshard()
                if inputs is None:
                    self._fill_gradients(module)
            torch.autograd.backward(
                roots, grads, retain_graph=is_idle, inputs=None if is_idle else inputs
            )

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Context manager for calls that communicate; sharded before and after."""
        self._is_inside = True
        yield
        for module in self._modules:
            module.reshard()
        self._is_inside = False

    @contextmanager
    def _configured(self) -> Iterator[None]:
        root: Any = self._model
        self._is_inside = False
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)
        root.set_reshard_after_forward(True)
        # the head is used after the model's forward
        root.set_reshard_after_forward(False, recurse=False)
        for module in self._modules:
            module.set_modules_to_backward_prefetch([module])  # that is, none
        try:
            yield
        finally:
            for module in self._modules:
                module.set_modules_to_backward_prefetch([])
                module.reshard()
            forget_forward_order(self._model)  # one entry per forward, never used here

    @contextmanager
    def _filling_gradients(self) -> Iterator[None]:
        """Give a layer zero gradients when its backward starts and it is gathered."""

        def after_forward(module: Any, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple | list) else [output]
            for tensor in outputs:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    # FSDP2 registered its hook before this one, so it runs before it
                    tensor.register_hook(lambda grad: self._fill_gradients(module))

        handles = [
            module.register_forward_hook(after_forward)
            for module in self._modules
            if module not in self._outermost
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _fill_gradients(self, module: nn.Module) -> None:
        for owner, name in self._own_parameters[id(module)]:
            parameter = getattr(owner, name)
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _drop_gradients(self) -> None:
        drop_unreduced_gradients(self._model)
        for parameter in self._model.parameters():
            parameter.grad = None


def why_not_whole(
    model: Any,
    config: ExecutorConfig,
    group: dist.ProcessGroup,
    longest_path: int,
    pending: float,
    training: bool,
    chooses_block: bool,
) -> str | None:
    """Return why the model cannot be gathered whole; None: every rank has room.

    Collective.

    Args:
        pending: bytes that a step takes beside parameters, activations and K/V.
        chooses_block: see `budgets_beside_whole_model`.
    """
    groups, device = group_bytes(model), next(model.parameters()).device
    usable = usable_memory(device, dist.get_world_size(group))
    budgets = budgets_beside_whole_model(
        model,
        config,
        compute_dtype(model),
        usable - sum(size for size, _ in groups) - pending,
        longest_path,
        training,
        chooses_block,
    )
    fits = budgets is None or budgets.fits
    if not count_failures(group, failed=not fits) or len(groups) < 3:
        return None
    reason = "another rank has no room" if fits else f"not even {budgets}"
    return (
        f"the whole model does not fit beside paths of {longest_path} tokens ({reason})"
    )


def _own_parameters(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (owner, name) of the parameters of one FSDP module, without nested ones.

    Not the parameters: they are other objects when sharded than when unsharded.
    """
    found: list[tuple[nn.Module, str]] = []
    pending = [module]
    while pending:
        owner = pending.pop()
        found += [(owner, name) for name, _ in owner.named_parameters(recurse=False)]
        pending += [m for m in owner.children() if not isinstance(m, FSDPModule)]
    return found
