"""KV cache of the path, and where the gradients of its keys and values are added up.

One buffer per layer, as long as the longest path above any fragment: [0, depth) is what
the current block sees. Every open fragment keeps K/V of its *trunk* (the tokens that
have a child fragment below them) and an accumulator of their gradients. Moving to a
child gathers its path from the open fragments into the buffer; leaving it adds the
buffer's gradients to the accumulator of the fragment that owns the tokens.

Accumulators are fp32 (fp64 for an fp64 model): many branches add into one prefix, and
bf16 sums lose the small ones.

Invariants, and the tests that hold them (tests/executor):
  * accumulators lose nothing: test_numerics.py
  * memory follows the longest path, not the number of branches: test_memory.py
"""

# K = key/value heads, P = path tokens, T = trunk tokens, H = head dim

from __future__ import annotations

import torch
from torch import Tensor

from areal_dta.executor.kernels import accumulation_dtype

Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""


class LayerPath:
    """The path buffer of one layer. Tensors are allocated at the first write."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kv: list[Tensor] = []  # keys, values: [1, K, P, H]
        self._grads: list[Tensor] = []

    def write(self, start: int, k: Tensor, v: Tensor, with_grad: bool) -> None:
        """Put k, v: [1, K, n, H] at depth [start, start + n); zero their gradients."""
        end = start + k.shape[2]
        if not self._kv:
            self._kv = [self._empty(x, x.dtype) for x in (k, v)]
        for buffer, x in zip(self._kv, (k, v), strict=True):
            buffer[:, :, start:end] = x
        if with_grad:
            if not self._grads:
                acc = accumulation_dtype(k.dtype)
                self._grads = [self._empty(x, acc) for x in (k, v)]
            for grad in self._grads:
                grad[:, :, start:end] = 0

    def read(self, start: int, end: int) -> Pair:
        """Return views of k, v at depth [start, end), [1, K, end - start, H]."""
        k, v = self._kv
        return k[:, :, start:end], v[:, :, start:end]

    def extended(self, start: int, end: int, k: Tensor, v: Tensor) -> Pair:
        """Return the path at depth [start, end) with the block's own k, v behind it.

        Copies only the block where the buffer has room, which it has for all but the
        deepest blocks. The block then lies behind the path until the next write there.
        """
        below = end + k.shape[2]
        if below > self._capacity:
            path_k, path_v = self.read(start, end)
            return torch.cat([path_k, k], 2), torch.cat([path_v, v], 2)
        for buffer, x in zip(self._kv, (k, v), strict=True):
            buffer[:, :, end:below] = x
        return self.read(start, below)

    def add_gradients(self, start: int, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add [1, K, n, H] to the gradients of the path at [start, start + n)."""
        for total, grad in zip(self._grads, (grad_k, grad_v), strict=True):
            total[:, :, start : start + grad.shape[2]] += grad

    def gradients(self, start: int, end: int) -> Pair:
        """Return views of dk, dv at depth [start, end)."""
        grad_k, grad_v = self._grads
        return grad_k[:, :, start:end], grad_v[:, :, start:end]

    def _empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (1, like.shape[1], self._capacity, like.shape[3])
        return torch.empty(shape, dtype=dtype, device=like.device)


class PathCache:
    """The path buffers of all layers."""

    def __init__(self, num_layers: int, capacity: int, with_grad: bool) -> None:
        self.layers = [LayerPath(capacity) for _ in range(num_layers)]
        self.with_grad = with_grad


class TrunkCache:
    """K/V of an open fragment's trunk, with the accumulators of their gradients.

    Args:
        start: depth of the fragment's first token.
        k, v: per layer [1, K, T, H], detached.
    """

    def __init__(
        self, path: PathCache, start: int, k: list[Tensor], v: list[Tensor]
    ) -> None:
        self._path, self._start = path, start
        self._k, self._v = k, v
        self._loaded: Tensor | None = None  # trunk positions now in the path buffer
        self.grad_k: list[Tensor] = []
        self.grad_v: list[Tensor] = []
        if path.with_grad:
            acc = accumulation_dtype(k[0].dtype)
            self.grad_k = [torch.zeros_like(x, dtype=acc) for x in k]
            self.grad_v = [torch.zeros_like(x, dtype=acc) for x in v]

    def load(self, positions: Tensor) -> None:
        """Make ``positions`` (trunk indices from the top down, [n]) the path's end."""
        self.unload()
        for layer, k, v in zip(self._path.layers, self._k, self._v, strict=True):
            layer.write(
                self._start,
                k.index_select(2, positions),
                v.index_select(2, positions),
                self._path.with_grad,
            )
        self._loaded = positions

    def unload(self) -> None:
        """Add the gradients of what was loaded to the accumulators."""
        if self._loaded is not None and self._path.with_grad:
            end = self._start + len(self._loaded)
            for i, layer in enumerate(self._path.layers):
                grad_k, grad_v = layer.gradients(self._start, end)
                self.grad_k[i].index_add_(2, self._loaded, grad_k)
                self.grad_v[i].index_add_(2, self._loaded, grad_v)
        self._loaded = None
