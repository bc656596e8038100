"""Peak memory of a step: activations, K/V, logits, masks and temporaries; not the
model, and not the parameter gradients, which are there before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make under it, as long as anything (a tensor,
    a view, an autograd graph) keeps them alive. What a kernel uses inside is not seen.

    Unlike the resident set size it does not depend on the allocator.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        """``existing`` are not counted, though operators may return them."""
        super().__init__()
        self._ignored = {t.untyped_storage()._cdata for t in existing}
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._upper = 0  # of the bytes alive: the dead are swept only at a new peak
        self.peak = 0

    @property
    def live(self) -> int:
        self._sweep()
        return self._upper

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # not reused while a weak reference is held
        if key in self._held or key in self._ignored:
            return
        self._held[key] = (StorageWeakRef(storage), storage.nbytes())
        self._upper += storage.nbytes()
        if self._upper > self.peak:
            self._sweep()
            self.peak = max(self.peak, self._upper)

    def _sweep(self) -> None:
        for key, (reference, num_bytes) in list(self._held.items()):
            if reference.expired():
                del self._held[key]
                self._upper -= num_bytes


def peak_bytes(run: Callable[[], object], model: torch.nn.Module) -> int:
    """Of ``run``, counted on a CPU and measured by the allocator on CUDA.

    The gradients of ``model`` must be there already.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    existing = [t for t in (*model.parameters(), *model.buffers())]
    existing += [p.grad for p in model.parameters() if p.grad is not None]
    with LiveBytes(existing) as counter:
        run()
    return counter.peak
