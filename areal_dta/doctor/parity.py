"""Attention kernels and small models on this device, against the truth.

A kernel is compared with masked softmax in fp64, on inputs that are rounded to the
kernel's dtype first: outputs and gradients, over the forms of attention that a
traversal asks for. A model is compared with training one sequence at a time.
"""

# S = queries, T = keys, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.executor.kernels import (
    KERNELS,
    AttentionKernel,
    Mask,
    PathKeys,
    Scoring,
    Term,
    accumulation_dtype,
)
from areal_dta.executor.layout.block_layout import BlockShape
from areal_dta.tree import PrefixTree

# Norm of the difference over the norm of the truth. Correct kernels differ by 3e-7 in
# fp32 and by 4e-3 in bf16.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
_HALF_TOLERANCE = 2e-2
_WORSE_THAN_DENSE = 1.5
"""How much further from the truth than dense training a model may be."""
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Errors of a model below this are those of rounding, whatever dense has."""

_HEADS = ((4, 4, 64), (8, 2, 64), (8, 1, 128), (4, 1, 256))
_BRANCHES = BlockShape([70, 30, 50, 5, 64], [-1, 0, 0, 1, -1])
_CHAIN = BlockShape([90], [-1])


@dataclass(frozen=True, slots=True)
class Parity:
    """How far from the truth something is."""

    name: str
    dtype: str
    error: float | None
    """None: it did not run."""
    tolerance: float
    failure: str = ""
    """Why it is wrong; empty: it is right, or cannot be used here."""
    note: str = ""


def check_kernels(device: str) -> list[Parity]:
    """Compare each kernel with masked softmax, in each dtype that it is for."""
    dtypes = [torch.float32, torch.bfloat16]
    found = []
    for kernel in KERNELS.values():
        for dtype in dtypes:
            found.append(_check_kernel(kernel, torch.device(device), dtype))
    return found


def _check_kernel(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype
) -> Parity:
    name, dtype_name = kernel.name, str(dtype).removeprefix("torch.")
    tolerance = _TOLERANCES.get(dtype, _HALF_TOLERANCE)
    worst, num_cases = 0.0, 0
    for heads in _HEADS:
        for where, mask, num_queries, num_keys in _cases(kernel):
            tensors = _tensors(heads, num_queries, num_keys, device, dtype)
            scoring = Scoring(heads[2] ** -0.5)
            # Triton's interpreter, for which this may be a CPU, is for tests.
            is_interpreted = kernel.takes_path and device.type == "cpu"
            if is_interpreted or not kernel.supports(*tensors[:3], scoring):
                continue
            try:
                error = kernel_error(kernel, tensors, mask, scoring)
            except (RuntimeError, NotImplementedError) as reason:
                text = f"{where}, heads {heads}: {str(reason).splitlines()[0]:.120}"
                return Parity(name, dtype_name, None, tolerance, failure=text)
            worst, num_cases = max(worst, error), num_cases + 1
            if not error <= tolerance:
                text = f"{where}, heads {heads}: error {error:.1e} > {tolerance:.0e}"
                return Parity(name, dtype_name, error, tolerance, failure=text)
    if not num_cases:
        return Parity(name, dtype_name, None, tolerance, note="not for this device")
    return Parity(name, dtype_name, worst, tolerance, note=f"{num_cases} cases")


def _cases(kernel: AttentionKernel) -> Iterator[tuple[str, Mask, int, int]]:
    """Yield a description, a new mask, the number of queries and of keys."""
    size = _BRANCHES.num_tokens
    yield "a branching block", Mask(_BRANCHES), size, size
    yield "a chain", Mask(_CHAIN), 90, 90
    if not kernel.takes_path:
        yield "a path", Mask(), 90, 700
        yield "one query behind a path", Mask(), 1, 700
    if kernel.joins_chains or kernel.takes_path:
        yield "a chain and its path", Mask(_CHAIN), 90, 700
        window = Mask(_CHAIN, window=200)
        yield "a chain and its path in a window", window, 90, 700


def _tensors(
    heads: tuple[int, int, int],
    num_queries: int,
    num_keys: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random q, k, v and gradient of the output."""
    generator = torch.Generator().manual_seed(num_queries + num_keys)
    num_heads, num_kv_heads, width = heads

    def draw(count: int, length: int) -> Tensor:
        # as a model makes them: the heads of a token lie together
        x = torch.randn(1, length, count, width, generator=generator)
        return x.to(device, dtype).transpose(1, 2)

    q, grad = draw(num_heads, num_queries), draw(num_heads, num_queries)
    return q, draw(num_kv_heads, num_keys), draw(num_kv_heads, num_keys), grad


def kernel_error(
    kernel: AttentionKernel,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Mask,
    scoring: Scoring,
) -> float:
    """Return the largest relative error of output, log-sum-exp and gradients."""
    truth = KERNELS["masked_softmax"]
    q, k, v, grad_out = (x.double() for x in tensors)
    exact_mask = Mask(mask.shape, mask.matrix, mask.window)
    exact_term = Term(k, v, exact_mask, scoring)
    out, lse = truth.forward(q, exact_term)
    want = [out, lse, *truth.backward(grad_out, q, out, lse, exact_term)]

    q, k, v, grad_out = tensors
    term = Term(k, v, mask, scoring)
    path_grads: list[Tensor] = []
    num_path = k.shape[2] - q.shape[2]
    if kernel.takes_path:
        depth_S = torch.arange(num_path, k.shape[2], device=q.device)
        mask = Mask(mask.shape, window=mask.window, depth_S=depth_S)
        path_k, path_v = (x[:, :, :num_path] for x in (k, v))
        path_grads = [torch.zeros_like(path_k, dtype=torch.float32) for _ in range(2)]
        path = PathKeys(path_k, path_v, 0, path_grads[0], path_grads[1])
        own_k, own_v = (x[:, :, num_path:] for x in (k, v))
        term = Term(own_k, own_v, mask, scoring, path if num_path else None)
    # The backward gets the output and log-sum-exp of all terms, rounded as they are
    # when a model runs.
    given = out.to(q.dtype), lse.to(accumulation_dtype(q.dtype))
    got = [*kernel.forward(q, term), *kernel.backward(grad_out, q, *given, term)]
    if path_grads:
        pairs = zip(path_grads, got[3:], strict=True)
        got[3:] = [torch.cat([a, b.to(a.dtype)], 2) for a, b in pairs]
    return max(_relative_error(a, b) for a, b in zip(got, want, strict=True))


def check_models(device: str) -> list[Parity]:
    """Compare whole small models with one sequence at a time, as `auto` runs them."""
    sizes = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    }
    configs = {
        "Qwen3": Qwen3Config(**sizes, tie_word_embeddings=True),
        "Mistral, window of 64": MistralConfig(**sizes, sliding_window=64),
    }
    dtypes = [torch.float32, *([torch.bfloat16] if device == "cuda" else [])]
    return [
        _check_model(name, config, torch.device(device), dtype)
        for name, config in configs.items()
        for dtype in dtypes
    ]


def _check_model(
    name: str, config: object, device: torch.device, dtype: torch.dtype
) -> Parity:
    sequences = _family(256)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to(device).train()
    dtype_name = str(dtype).removeprefix("torch.")

    # The truth in fp64; then dense training and the tree in the dtype.
    model.double()
    oracle.forward_backward(model, sequences, _loss)
    want = _gradients(model)
    model.to(dtype)
    oracle.forward_backward(model, sequences, _loss)
    dense_error = _relative_error(_gradients(model), want)
    allowed = max(_WORSE_THAN_DENSE * dense_error, _ROUNDING[dtype])
    tree = PrefixTree.from_sequences(sequences)
    worst = 0.0
    for block_tokens, retain_tokens in ((64, 0), (512, None)):
        try:
            executor = TreeExecutor(model, ExecutorConfig(block_tokens, retain_tokens))
            executor.forward_backward(tree, _loss)
        except (RuntimeError, ValueError) as reason:
            text = f"{str(reason).splitlines()[0]:.150}"
            return Parity(name, dtype_name, None, allowed, failure=text)
        worst = max(worst, _relative_error(_gradients(model), want))
    failure = "" if worst <= allowed else f"error {worst:.1e} > {allowed:.1e}"
    note = f"dense itself {dense_error:.1e}"
    return Parity(name, dtype_name, worst, allowed, failure, note)


def _family(vocab_size: int) -> list[list[int]]:
    """Return sequences that branch at several depths: 300 tokens at most."""
    rng = np.random.default_rng(0)

    def some(count: int) -> list[int]:
        drawn: list[int] = rng.integers(0, vocab_size, count).tolist()
        return drawn

    trunk = some(150)
    sequences = []
    for _ in range(3):
        branch = [*trunk, *some(60)]
        sequences += [[*branch, *some(count)] for count in (90, 17, 1)]
    return [*sequences, trunk, sequences[0], some(40)]


def _loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    weight = torch.randn(len(logprobs), generator=generator).to(logprobs)
    return (logprobs * weight).sum() + 0.1 * entropy.sum()


def _gradients(model: torch.nn.Module) -> Tensor:
    """Return all gradients as one fp64 vector, and set them to None."""
    flat = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(flat)


def _relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
