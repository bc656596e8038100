"""A CUDA device without a card: fake tensors, and a count of what the host waits for.

Under `FakeTensorMode` a tensor says that it is on CUDA and has no data, so PyTorch
refuses to mix devices and to read a value. Copies from the host and reads are counted.
PyTorch's autograd engine wants a real device, so its graph is walked here.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_dta.executor.fused import layers

_tasks = itertools.count(1)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


@dataclass
class Calls:
    """What was asked of the device."""

    copies: int = 0
    """Host to device."""
    syncs: int = 0
    names: list[str] = field(default_factory=list)
    """Operators on tensors of the device, in order."""


class _Counter(TorchDispatchMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if any(x.device.type == "cuda" for x in [*given, *made]):
            self._calls.names.append(str(func))
        if func in _COPIES:
            source = given[-1]
            is_from_host = source.device.type == "cpu"
            self._calls.copies += is_from_host and made[0].device.type == "cuda"
        return out


class _Event:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def record(self, stream) -> None:
        pass

    def synchronize(self) -> None:
        self._calls.syncs += 1

    def elapsed_time(self, other) -> float:
        return 1.0


def backward(roots: Sequence, grads: Sequence, inputs: Sequence | None = None) -> None:
    """Do what `torch.autograd.backward` does, node by node: later ones first."""
    pending: dict = {}
    heap: list = []
    task = next(_tasks)

    def send(node, index: int, grad) -> None:
        if node is None or grad is None:
            return
        wanted = node._input_metadata[index]  # what the engine makes of broadcasts
        if grad.shape != wanted.shape:
            grad = grad.sum_to_size(wanted.shape)
        grad = grad.to(wanted.dtype)
        if node not in pending:
            pending[node] = {}
            heapq.heappush(heap, (-_order(node), id(node), node))
        before = pending[node].get(index)
        pending[node][index] = grad if before is None else before + grad

    for root, grad in zip(roots, grads, strict=True):
        send(root.grad_fn, root.output_nr, grad)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        # Checkpoints run again once per backward, which they know by this number.
        patch.setattr(torch._C, "_current_graph_task_id", lambda: task)
        while heap:
            node = heapq.heappop(heap)[2]
            received = pending.pop(node)
            if hasattr(node, "variable"):  # a leaf
                leaf, grad = node.variable, received[0]
                if inputs is None or any(leaf is x for x in inputs):
                    accumulate(leaf, grad)
                continue
            given = [received.get(i) for i in range(max(received) + 1)]
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                given += [None] * (_num_outputs(node) - len(given))
                out = node.apply(*given)
            else:
                out = node(*given)
            out = out if isinstance(out, tuple) else (out,)
            for (next_node, index), grad in zip(node.next_functions, out, strict=False):
                send(next_node, index, grad)


def accumulate(leaf: torch.Tensor, grad: torch.Tensor) -> None:
    """Do what PyTorch does with the gradient of a leaf; replaced by who counts it."""
    leaf.grad = grad if leaf.grad is None else leaf.grad + grad


def _num_outputs(node) -> int:
    name = type(node).__name__
    return 2 if "FusedHead" in name or "Rotate" in name else 1


def _order(node) -> int:
    return -1 if hasattr(node, "variable") else node._sequence_nr()


def grad(value, inputs: Sequence, allow_unused: bool) -> list:
    """Do what `torch.autograd.grad` does, for leaves."""
    backward([value], [torch.ones_like(value)], inputs)
    return [x.grad for x in inputs]


@contextmanager
def fake_cuda(counts: bool = True) -> Iterator[Calls]:
    """Context manager in which CUDA tensors can be made.

    Args:
        counts: False leaves copies and names out, for those who record more.
    """
    calls = Calls()

    def read(tensor):
        calls.syncs += 1
        return [0.0] * tensor.numel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTensor, "tolist", read)
        patch.setattr(torch.autograd, "backward", backward)
        patch.setattr(torch.autograd, "grad", grad)
        patch.setattr(torch.cuda, "Event", lambda **options: _Event(calls))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(layers, "_difference", lambda probe: None)  # values to compare
        counter = _Counter(calls) if counts else nullcontext()
        with FakeTensorMode(allow_non_fake_inputs=True), counter:
            yield calls


def move(model: torch.nn.Module) -> torch.nn.Module:
    """Replace parameters and buffers by fake ones on CUDA; inside `fake_cuda`."""
    moved: dict = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, x in own.items():
                if x is None:
                    continue
                if x not in moved:
                    like = torch.empty(x.shape, dtype=x.dtype, device="cuda")
                    is_parameter = isinstance(x, torch.nn.Parameter)
                    moved[x] = torch.nn.Parameter(like) if is_parameter else like
                own[name] = moved[x]
    return model
