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

from collections.abc import Iterable

import torch
from torch import Tensor

from areal_dta.executor.kernels import PathKeys, accumulation_dtype

Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""
Positions = slice | Tensor
"""Where tokens lie: a slice where they lie together, else indices, each once."""


def take(x: Tensor, at: Positions) -> Tensor:
    """Return the tokens of [1, K, T, H] at some positions; a view for a slice."""
    return x[:, :, at] if isinstance(at, slice) else x.index_select(2, at)


def add_at(total: Tensor, at: Positions, part: Tensor) -> None:
    """Add [1, K, n, H] to the tokens of ``total`` at some positions."""
    if isinstance(at, slice):
        total[:, :, at] += part
    else:
        total.index_add_(2, at, part)


def trunk_part(x: Tensor, at: Positions, is_live: bool) -> Tensor:
    """Return the trunk's part of a block's keys [1, K, S, H] or values.

    The block's own tensor where that is all trunk, unless it would keep a larger one
    alive, such as q, k and v in one.
    """
    if isinstance(at, slice) and at == slice(0, x.shape[2]):
        is_own = x.untyped_storage().nbytes() == x.numel() * x.element_size()
        if is_live or is_own:
            return x
    return take(x, at).clone() if isinstance(at, slice) else take(x, at)


def spread(grad: Tensor, at: Positions, like: Tensor) -> Tensor:
    """Return the gradient of a whole block from that of its trunk."""
    if grad.shape == like.shape:
        return grad
    whole = torch.zeros_like(like)
    if isinstance(at, slice):
        whole[:, :, at] = grad
        return whole
    return whole.index_copy_(2, at, grad)


class LayerPath:
    """The path buffer of one layer. Tensors are allocated at the first write.

    Args:
        capacity: tokens of the longest path.
        room: further tokens behind it, for the K/V of blocks (see `extended`).
    """

    def __init__(self, capacity: int, room: int) -> None:
        self._capacity, self._room = capacity, room
        self._kv: list[Tensor] = []  # keys, values: [1, K, P, H]
        self._grads: list[Tensor] = []

    def write(self, start: int, k: Tensor, v: Tensor, with_grad: bool) -> None:
        """Put k, v: [1, K, n, H] at depth [start, start + n); zero their gradients."""
        end = start + k.shape[2]
        if not self._kv:
            size = self._capacity + self._room
            self._kv = [_empty(x, size, x.dtype) for x in (k, v)]
        for buffer, x in zip(self._kv, (k, v), strict=True):
            buffer[:, :, start:end] = x
        if with_grad:
            if not self._grads:
                acc = accumulation_dtype(k.dtype)
                self._grads = [_empty(x, self._capacity, acc) for x in (k, v)]
            for grad in self._grads:
                grad[:, :, start:end] = 0

    def read(self, start: int, end: int) -> Pair:
        """Return views of k, v at depth [start, end), [1, K, end - start, H]."""
        k, v = self._kv
        return k[:, :, start:end], v[:, :, start:end]

    def extended(self, start: int, end: int, k: Tensor, v: Tensor) -> Pair:
        """Return the path at depth [start, end) with the block's own k, v behind it.

        Copies only the block, which then lies behind the path until the next write.
        """
        below = end + k.shape[2]
        assert below <= self._capacity + self._room
        for buffer, x in zip(self._kv, (k, v), strict=True):
            buffer[:, :, end:below] = x
        return self.read(start, below)

    def keys(self, start: int, end: int) -> PathKeys:
        """Return the path at depth [start, end), with where its gradients belong."""
        grads = self.gradients(start, end) if self._grads else (None, None)
        return PathKeys(*self.read(start, end), start, *grads)

    def add_gradients(self, start: int, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add [1, K, n, H] to the gradients of the path at [start, start + n)."""
        for total, grad in zip(self._grads, (grad_k, grad_v), strict=True):
            total[:, :, start : start + grad.shape[2]] += grad

    def gradients(self, start: int, end: int) -> Pair:
        """Return views of dk, dv at depth [start, end)."""
        grad_k, grad_v = self._grads
        return grad_k[:, :, start:end], grad_v[:, :, start:end]


def _empty(like: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    shape = (1, like.shape[1], num_tokens, like.shape[3])
    return torch.empty(shape, dtype=dtype, device=like.device)


class PathCache:
    """The path buffers of the layers that attend, by layer index."""

    def __init__(
        self, layers: Iterable[int], capacity: int, with_grad: bool, room: int = 0
    ) -> None:
        self.layers = {i: LayerPath(capacity, room) for i in sorted(layers)}
        self.with_grad = with_grad


class TrunkCache:
    """K/V of an open fragment's trunk, with the accumulators of their gradients.

    Args:
        start: depth of the fragment's first token.
        k, v: per layer that attends [1, K, T, H], detached.
    """

    def __init__(
        self, path: PathCache, start: int, k: list[Tensor], v: list[Tensor]
    ) -> None:
        self._path, self._start = path, start
        self._k, self._v = k, v
        self._loaded: Positions | None = None  # trunk positions in the path buffer
        self._num_loaded = 0
        self.grad_k: list[Tensor] = []
        self.grad_v: list[Tensor] = []
        if path.with_grad:
            self.grad_k, self.grad_v = (
                [torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in xs]
                for xs in (k, v)
            )

    def load(self, positions: Positions, num_tokens: int) -> None:
        """Make ``positions`` (trunk indices from the top down) the path's end."""
        self.unload()
        layers = self._path.layers.values()
        for layer, k, v in zip(layers, self._k, self._v, strict=True):
            layer.write(
                self._start,
                take(k, positions),
                take(v, positions),
                self._path.with_grad,
            )
        self._loaded, self._num_loaded = positions, num_tokens

    def unload(self) -> None:
        """Add the gradients of what was loaded to the accumulators."""
        if self._loaded is not None and self._path.with_grad:
            end = self._start + self._num_loaded
            for i, layer in enumerate(self._path.layers.values()):
                grad_k, grad_v = layer.gradients(self._start, end)
                add_at(self.grad_k[i], self._loaded, grad_k)
                add_at(self.grad_v[i], self._loaded, grad_v)
        self._loaded = None
