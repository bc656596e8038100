"""Attention of a block behind its path, and the hook that gives it to the model.

Attention over a union of key sets is the average of the attention over each set,
weighted by exp(log-sum-exp). So a block needs two terms and no mask wider than itself:
its queries against the path, and against the block.

The backward hands dq, dk, dv of the block to autograd and adds the path's dk, dv
straight into the path accumulators: the path is a leaf here, and the fragment that
owns it takes its gradients backward when all its branches are done.
"""

# S = block tokens, P = path tokens, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from areal_dta.executor.backends import (
    AttentionBackend,
    Mask,
    accumulation_dtype,
    select_backend,
)
from areal_dta.executor.model_support import UnsupportedModelError, check_attention_call
from areal_dta.executor.path_cache import LayerPath, PathCache

ATTENTION_NAME = "areal_dta"


@dataclass(slots=True)
class BlockAttention:
    """What the attention of one block needs to know, and what it leaves behind."""

    path: PathCache
    path_tokens: int
    mask: Mask
    backend_name: str
    max_depth: int
    """Longest path of the tree: what a sliding window has to cover."""
    keep_kv: bool
    keys: dict[int, Tensor] = field(default_factory=dict)
    """Per layer [1, K, S, H], part of the block's graph; only with ``keep_kv``."""
    values: dict[int, Tensor] = field(default_factory=dict)
    num_calls: int = 0

    def restart(self) -> None:
        """Forget a call of the model, to run the block once more."""
        self.keys, self.values, self.num_calls = {}, {}, 0


_active_block: ContextVar[BlockAttention | None] = ContextVar(
    "areal_dta_active_block", default=None
)


class _PathAttention(torch.autograd.Function):
    """Merged attention over path and block. q: [1, N, S, H]; k, v: [1, K, S, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerPath,
        path_tokens: int,
        mask: Mask,
        backend: AttentionBackend,
        scale: float,
    ) -> Tensor:
        out, lse = backend.forward(q, k, v, mask, scale)
        if path_tokens:
            path_k, path_v = layer.read(path_tokens)
            path_out, path_lse = backend.forward(q, path_k, path_v, Mask(), scale)
            out, lse = _merge(out, lse, path_out, path_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layer, ctx.path_tokens = layer, path_tokens
        ctx.mask, ctx.backend, ctx.scale = mask, backend, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_q, grad_k, grad_v = ctx.backend.backward(
            grad_out, q, k, v, out, lse, ctx.mask, ctx.scale
        )
        if ctx.path_tokens:
            path_k, path_v = ctx.layer.read(ctx.path_tokens)
            path_grad_q, path_grad_k, path_grad_v = ctx.backend.backward(
                grad_out, q, path_k, path_v, out, lse, Mask(), ctx.scale
            )
            ctx.layer.add_gradients(path_grad_k, path_grad_v)
            grad_q = grad_q + path_grad_q
        grad_k, grad_v = grad_k.to(k.dtype), grad_v.to(v.dtype)
        return grad_q, grad_k, grad_v, None, None, None, None, None


def _merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Average two partial outputs in fp32: flash rounds each to the compute dtype."""
    acc = accumulation_dtype(a.dtype)
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).unsqueeze(-1)
    weight_b = torch.exp(lse_b - lse).unsqueeze(-1)
    return (a.to(acc) * weight_a + b.to(acc) * weight_b).to(a.dtype), lse


def _block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in each layer. Returns [1, S, N, H]."""
    block = _active_block.get()
    if block is None:
        raise RuntimeError(
            f"attention {ATTENTION_NAME!r} was called outside a TreeExecutor; restore "
            "the model with `model.set_attn_implementation('sdpa')`"
        )
    check_attention_call(
        module, query, attention_mask, dropout, block.max_depth, kwargs
    )
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
    block.num_calls += 1
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if block.keep_kv:
        block.keys[layer_idx], block.values[layer_idx] = key, value
    out = _PathAttention.apply(
        query,
        key,
        value,
        block.path.layers[layer_idx],
        block.path_tokens,
        block.mask,
        select_backend(block.backend_name, query, key, value),
        scale,
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, _block_attention)


@contextmanager
def tree_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give the model our attention; put its own back at the end."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


@contextmanager
def active_block(block: BlockAttention, num_layers: int) -> Iterator[None]:
    """Run one model call on ``block``.

    Raises:
        UnsupportedModelError: some layer did not ask for attention exactly once, so
            it mixes tokens in a way that the executor does not see.
    """
    token = _active_block.set(block)
    try:
        yield
    finally:
        _active_block.reset(token)
    if block.num_calls != num_layers:
        raise UnsupportedModelError(
            f"{block.num_calls} of {num_layers} layers called the attention interface; "
            "expected one call a layer: the model mixes tokens outside attention (SSM, "
            "linear attention) or has its own attention code. Use the dense engine "
            "(actor.backend=fsdp:…) for it"
        )
