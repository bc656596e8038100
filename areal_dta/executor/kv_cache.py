"""Keys and values of the current path, and the gradients that come back to them.

One buffer a layer, as long as the longest path above any fragment: [0, depth) is what
the block in work sees. Every open fragment keeps K/V of its *trunk* (the tokens that
have a child fragment below them) and an accumulator of their gradients. Moving to a
child gathers its path from the open fragments into the buffer; leaving it adds the
buffer's gradients to the owner's accumulator.

Gradient accumulators are fp32 (fp64 for an fp64 model): many branches add into one
prefix, and bf16 sums lose the small ones.
"""

# K = key/value heads, P = path tokens, T = trunk tokens, H = head dim

from __future__ import annotations

import torch
from torch import Tensor

from areal_dta.executor.kernels import accumulation_dtype


class LayerPath:
    """The path buffer of one layer. Buffers are made at the first write."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._k: Tensor | None = None  # [1, K, P, H]
        self._v: Tensor | None = None
        self._grad_k: Tensor | None = None
        self._grad_v: Tensor | None = None

    def write(self, start: int, k: Tensor, v: Tensor, with_grad: bool) -> None:
        """Put k, v: [1, K, n, H] at depth [start, start + n); zero their gradients."""
        end = start + k.shape[2]
        if self._k is None or self._v is None:
            self._k, self._v = self._empty(k), self._empty(v)
        self._k[:, :, start:end] = k
        self._v[:, :, start:end] = v
        if with_grad:
            if self._grad_k is None or self._grad_v is None:
                acc = accumulation_dtype(k.dtype)
                self._grad_k, self._grad_v = self._empty(k, acc), self._empty(v, acc)
            self._grad_k[:, :, start:end] = 0
            self._grad_v[:, :, start:end] = 0

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """k, v of the path at depth [start, end), [1, K, end - start, H], views."""
        assert self._k is not None and self._v is not None
        return self._k[:, :, start:end], self._v[:, :, start:end]

    def extended(
        self, start: int, end: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """k, v of the path at [start, end) and the block's own k, v behind, without
        a copy where the buffer has room, as it has for all but the deepest blocks.

        Until the next write there the buffer's end holds them, beyond the path.
        """
        path_k, path_v = self.read(start, end)
        below = end + k.shape[2]
        if below > self._capacity:
            return torch.cat([path_k, k], 2), torch.cat([path_v, v], 2)
        assert self._k is not None and self._v is not None
        self._k[:, :, end:below] = k
        self._v[:, :, end:below] = v
        return self.read(start, below)

    def add_gradients(self, start: int, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add [1, K, n, H] to the gradients of the path at [start, start + n)."""
        assert self._grad_k is not None and self._grad_v is not None
        end = start + grad_k.shape[2]
        self._grad_k[:, :, start:end] += grad_k
        self._grad_v[:, :, start:end] += grad_v

    def gradients(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        assert self._grad_k is not None and self._grad_v is not None
        return self._grad_k[:, :, start:end], self._grad_v[:, :, start:end]

    def _empty(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        shape = (1, like.shape[1], self._capacity, like.shape[3])
        return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


class PathCache:
    """The path buffers of all layers."""

    def __init__(self, num_layers: int, capacity: int, with_grad: bool) -> None:
        self.layers = [LayerPath(capacity) for _ in range(num_layers)]
        self.with_grad = with_grad


class TrunkCache:
    """K/V of an open fragment's trunk with their gradient accumulators."""

    def __init__(self, path: PathCache, start: int, k: list[Tensor], v: list[Tensor]):
        """``k[layer]``, ``v[layer]``: [1, K, T, H], detached; ``start``: depth of the
        fragment's first token."""
        self._path = path
        self._start = start
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
        """Take the gradients of what was loaded into the accumulators."""
        if self._loaded is not None and self._path.with_grad:
            end = self._start + len(self._loaded)
            for i, layer in enumerate(self._path.layers):
                grad_k, grad_v = layer.gradients(self._start, end)
                self.grad_k[i].index_add_(2, self._loaded, grad_k)
                self.grad_v[i].index_add_(2, self._loaded, grad_v)
        self._loaded = None
