"""What ``kernel=auto`` becomes on a GPU: the fastest of the kernels that are right.

A new kernel may be wrong or slow on a card that nobody has tried. So before the first
block, each candidate computes a small branching block, forward and backward, and is
compared with masked softmax in fp32; those that agree are timed on a block of the run's
own shape. All ranks take the same one: it must be right on all, and its slowest rank
counts.
"""

# S = block tokens, P = path tokens, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from areal_dta.executor.attention import BlockAttention, LayerAttention, attend
from areal_dta.executor.kernels import Mask, accumulation_dtype
from areal_dta.executor.kernels.triton_ops import is_installed
from areal_dta.executor.kv_cache import PathCache
from areal_dta.executor.layout.block_layout import BlockShape

CANDIDATES = ("auto", "flash_triton", "triton_tree")
"""PyTorch's kernels, layer by layer; those with ours for branches; ours alone. The
first wins a tie."""
TOLERANCE = 8.0
"""Maximum relative error of a kernel, in units of the dtype's rounding."""
_SMALL = ([37, 20, 11, 30], [-1, 0, 0, -1])
_SMALL_PATH = 75
_REPEATS = 3

Gather = Callable[[dict[str, float | None]], Sequence[dict[str, float | None]]]
"""Exchanges what the ranks found; each gets the list of all."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The shape of a run's blocks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    path_tokens: int

    @classmethod
    def of(cls, model: nn.Module, block_tokens: int, path_tokens: int) -> BlockSizes:
        """Return those of a Transformers model."""
        config: Any = model.config
        sizes = config.get_text_config()
        num_heads = sizes.num_attention_heads
        num_kv_heads = getattr(sizes, "num_key_value_heads", None) or num_heads
        head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // num_heads
        return cls(num_heads, num_kv_heads, head_dim, block_tokens, path_tokens)


class _Trial:
    """Random inputs of one block, which any kernel can compute."""

    def __init__(
        self,
        sizes: BlockSizes,
        segments: tuple[list[int], list[int]],
        num_path: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.num_path = BlockShape(*segments), num_path
        draw = torch.Generator().manual_seed(0)

        def random(heads: int, num_tokens: int) -> Tensor:
            x = torch.randn(1, num_tokens, heads, sizes.head_dim, generator=draw)
            return x.to(device, dtype).transpose(1, 2)

        size = self.shape.num_tokens
        self.q, self.grad_out = (random(sizes.num_heads, size) for _ in range(2))
        self.k, self.v = (random(sizes.num_kv_heads, size) for _ in range(2))
        self.path = [random(sizes.num_kv_heads, num_path) for _ in range(2)]
        ends: list[int] = []
        depths: list[int] = []
        for length, parent in zip(*segments, strict=True):
            start = ends[parent] if parent >= 0 else num_path
            depths += range(start, start + length)
            ends.append(start + length)
        self.depth_S = torch.tensor(depths, device=device)
        self.depths = min(depths), max(depths)

    def run(
        self, kernel: str, layer: LayerAttention, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return out, dq, dk, dv and the gradients of the path."""
        dtype = dtype or self.q.dtype
        size = self.shape.num_tokens
        path = PathCache([0], self.num_path, with_grad=True, room=size)
        path_k, path_v = (x.to(dtype) for x in self.path)
        path.layers[0].write(0, path_k, path_v, with_grad=True)
        block = BlockAttention(
            path=path,
            path_tokens=self.num_path,
            depth_S=self.depth_S,
            depths=self.depths,
            mask=Mask(self.shape),
            kernel_name=kernel,
            keep_kv=False,
            layers={},
        )
        q, k, v = (
            x.to(dtype).detach().requires_grad_() for x in (self.q, self.k, self.v)
        )
        with torch.enable_grad():
            out = attend(block, 0, layer, q, k, v, None)
        grad_out = self.grad_out.to(dtype).transpose(1, 2)
        grads = torch.autograd.grad(out, [q, k, v], grad_out)
        return [out.detach(), *grads, *path.layers[0].gradients(0, self.num_path)]


def largest_error(trial: _Trial, kernel: str, layer: LayerAttention) -> float:
    """Return the largest relative error, in units of the dtype's rounding."""
    want = trial.run("masked_softmax", layer, accumulation_dtype(trial.q.dtype))
    got = trial.run(kernel, layer)
    eps = torch.finfo(trial.q.dtype).eps
    errors = [
        float((a.to(b.dtype) - b).norm() / b.norm().clamp_min(1e-30) / eps)
        for a, b in zip(got, want, strict=True)
    ]
    return max(e if e == e else float("inf") for e in errors)


def seconds_of(trial: _Trial, kernel: str, layer: LayerAttention) -> float:
    """Return the median seconds of one layer, forward and backward."""

    def once() -> float:
        start = time.perf_counter()
        trial.run(kernel, layer)
        if trial.q.is_cuda:
            torch.cuda.synchronize(trial.q.device)
        return time.perf_counter() - start

    once()  # compiles
    return statistics.median(once() for _ in range(_REPEATS))


def choose_kernel(
    sizes: BlockSizes,
    layers: Sequence[LayerAttention],
    device: torch.device,
    dtype: torch.dtype,
    gather: Gather = lambda found: [found],
    measure: Callable[[_Trial, str, LayerAttention], float] = seconds_of,
) -> tuple[str, str]:
    """Choose between the candidates. Collective, if ``gather`` is.

    Args:
        layers: of the model; alike ones are tried once.
        measure: how a candidate is timed.

    Returns:
        The name, and one line that says what was found.
    """
    small = _Trial(sizes, _SMALL, _SMALL_PATH, device, dtype)
    half = max(1, sizes.block_tokens // 2)
    own = _Trial(sizes, ([half] * 2, [-1, -1]), sizes.path_tokens, device, dtype)
    kinds = list(dict.fromkeys(layers))
    found: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for name in CANDIDATES:
        found[name] = None
        if name in ("flash_triton", "triton_tree") and not is_installed():
            notes[name] = "no Triton"
            continue
        try:
            error = max(largest_error(small, name, layer) for layer in kinds)
            if error > TOLERANCE:
                notes[name] = f"wrong by {error:.3g} roundings"
                continue
            found[name] = sum(measure(own, name, layer) for layer in kinds)
        except _failures() as failure:
            notes[name] = f"{type(failure).__name__}: {str(failure).splitlines()[:1]}"
    chosen = fastest(gather(found))
    for name, seconds in found.items():
        if seconds is not None:
            notes[name] = f"{1e3 * seconds:.2f} ms"
    text = ", ".join(f"{name} {note}" for name, note in notes.items())
    size = f"{sizes.block_tokens} tokens behind {sizes.path_tokens}"
    return chosen, f"attention kernel: {chosen} ({size}, forward + backward: {text})"


def fastest(of_ranks: Sequence[dict[str, float | None]]) -> str:
    """Return the kernel whose slowest rank is fastest, of those right on all ranks."""
    worst: dict[str, float] = {}
    for name in CANDIDATES:
        seconds = [found.get(name) for found in of_ranks]
        known = [x for x in seconds if x is not None]
        if len(known) == len(seconds):
            worst[name] = max(known)
    return min(worst, key=lambda name: worst[name], default="masked_softmax")


def _failures() -> tuple[type[Exception], ...]:
    """Return what a kernel that does not run here raises."""
    if not is_installed():
        return RuntimeError, ValueError
    from triton.errors import TritonError

    return RuntimeError, ValueError, TritonError
