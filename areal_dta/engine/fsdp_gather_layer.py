"""FSDP2 with ranks in step: parameters gathered layer by layer, in every block.

`session` gathers the whole model for a pass, which costs the unsharded parameters and
their unsharded gradients. Here FSDP2 does what it does by nature: a layer is gathered
before its forward and its backward, resharded after, and its gradients are
reduce-scattered in every backward. What a rank holds is its shard, one layer, and the
outermost parameters (embedding, head).

All ranks must then run the same collectives in the same order although their trees
differ. So the ranks tell one another their operations before a traversal and agree on
rounds (`plan.rounds`): in a round all run a forward, or all a backward, and who has
none runs one of a single token and zero gradient.

What makes a backward issue the same collectives whatever its roots:
  * The outermost and the last layer's parameters are gathered up front: a backward
    that starts from keys and values would miss the hooks on the last layer's output.
  * Nothing is prefetched: FSDP2 would prefetch by the order of the last forwards.
  * Parameters without a gradient get zeros, or ranks would reduce different ones.

Invariants, and the tests that hold them (tests/engine/test_lockstep.py): gradients
equal those of one rank on all rows; no more than two layers are gathered at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from areal_dta.engine.fsdp_gather_step import (
    PeerFailure,
    forget,
    forget_order,
    raise_if_any_failed,
)
from areal_dta.executor.block import IdleCall
from areal_dta.schedule import Round, Schedule, merge_rounds, operations
from areal_dta.schedule.rounds import BACKWARD, FORWARD


class LockStep:
    """The pace (`executor.block.Pace`) of a model sharded by FSDP2.

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
        """Any number of traversals. Collective; as `session.training_pass`.

        An error between two calls of the model (in a loss) is told to the other
        ranks, which raise too. One inside a call, such as being out of memory, leaves
        them waiting until the time-out of their process group.

        Raises:
            PeerFailure: another rank failed; this one has dropped its gradients too.
        """
        with self._configured(), self._filling_gradients():
            try:
                yield
            except Exception:
                if not self._is_inside:
                    _tell_of_failure(self._group)
                self._drop_gradients()
                raise
            try:
                raise_if_any_failed(self._group)
            except PeerFailure:
                self._drop_gradients()
                raise

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Any number of forward-only traversals. Collective."""
        with self._configured():
            yield

    @contextmanager
    def traversal(self, schedule: Schedule, idle_call: IdleCall) -> Iterator[None]:
        self._rounds = merge_rounds(self._exchange(operations(schedule)))
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

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self._wait_for(BACKWARD)
        self._backward(roots, grads)

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

    def _backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        is_idle = not roots
        if is_idle:
            roots = self._idle_roots
            grads = [torch.zeros_like(root) for root in roots]
        with self._inside():
            for module in self._outermost:
                module.unshard()
                self._fill_gradients(module)
            torch.autograd.backward(roots, grads, retain_graph=is_idle)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Around what communicates; everything is sharded before and after."""
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
            forget_order(self._model)  # one entry a forward: never used here

    @contextmanager
    def _filling_gradients(self) -> Iterator[None]:
        """When a layer's backward starts, have it gathered, then give it gradients."""

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

    def _exchange(self, own: str) -> list[str]:
        size = dist.get_world_size(self._group)
        length = torch.tensor([len(own)])
        lengths = [torch.zeros_like(length) for _ in range(size)]
        dist.all_gather(lengths, length, group=self._group)
        width = max(1, *(int(n) for n in lengths))
        padded = own.encode().ljust(width)
        mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        gathered = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine, group=self._group)
        return [bytes(g.tolist()).decode().rstrip() for g in gathered]

    def _drop_gradients(self) -> None:
        forget(self._model)
        for parameter in self._model.parameters():
            parameter.grad = None


def _tell_of_failure(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.tensor([1]), group=group)


def _own_parameters(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the parameters of one FSDP module live, nested FSDP modules left out.

    By owner and name: the parameter objects differ when sharded and unsharded.
    """
    found: list[tuple[nn.Module, str]] = []
    pending = [module]
    while pending:
        owner = pending.pop()
        found += [(owner, name) for name, _ in owner.named_parameters(recurse=False)]
        pending += [m for m in owner.children() if not isinstance(m, FSDPModule)]
    return found
