"""Attention of a block behind its path, and the hook that gives it to Transformers.

Attention over a union of key sets is the average of the attention over each set,
weighted by exp(log-sum-exp). So a block needs two terms and no mask wider than itself:
its queries against the path, and against the block. An attention sink is a third set:
one key per head with a learned score and the value 0.

The backward hands dq, dk, dv of the block to autograd and adds dk, dv of the path to
the accumulators in kv_cache.py: the path is a leaf here, and the fragment that owns it
takes its gradients backward when all its branches are done.

Invariants, and the tests that hold them (tests/executor):
  * every kernel gives what masked softmax gives: test_kernels.py
  * windows, soft caps and sinks give what eager attention gives: test_parity.py
  * the model gets its own attention back: test_model_refusals.py
"""

# S = block tokens, P = path tokens, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from areal_dta.executor.kernels import (
    KERNELS,
    AttentionKernel,
    Mask,
    Scoring,
    Term,
    merge,
    select_kernel,
)
from areal_dta.executor.kv_cache import LayerPath, PathCache
from areal_dta.executor.last_layer import NeededRows
from areal_dta.executor.model_refusals import (
    REMEDY,
    UnsupportedModelError,
    check_attention_call,
    layer_name,
)

ATTENTION_NAME = "areal_dta"


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer asks of its attention, as checks/attention_profile.py finds it."""

    asked: tuple[Any, ...]
    """What its calls pass, see `requested`; later calls must pass the same."""
    window: int | None
    """Queries see so many tokens, themselves included; None: all."""
    scale: float
    softcap: float | None


def requested(scaling: float | None, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a call asks for that must not change between calls."""
    has_sinks = kwargs.get("s_aux") is not None
    return scaling, kwargs.get("sliding_window"), kwargs.get("softcap"), has_sinks


@dataclass(slots=True)
class BlockAttention:
    """What the attention of one block needs to know, and what it leaves behind."""

    path: PathCache
    path_tokens: int
    depth_S: Tensor
    """Depth of each token of the block."""
    depths: tuple[int, int]
    """The lowest and the highest of them, known on the host."""
    mask: Mask
    kernel_name: str
    keep_kv: bool
    layers: Mapping[int, LayerAttention]
    keys: dict[int, Tensor] = field(default_factory=dict)
    """Keys [1, K, S, H] per layer, part of the block's graph; only with ``keep_kv``."""
    values: dict[int, Tensor] = field(default_factory=dict)
    num_calls: int = 0
    path_mask: Mask = field(default_factory=Mask)
    """Mask of the whole path, which every query sees."""
    needed_rows: NeededRows | None = None
    """Rows on which the last layer runs; None: it runs whole."""
    _windows: dict[tuple[int, bool], tuple[int, Mask, Mask]] = field(
        default_factory=dict
    )

    def restart(self) -> None:
        """Forget a call of the model, to run the block once more."""
        self.keys, self.values, self.num_calls = {}, {}, 0

    def window(
        self, size: int | None, kernel: AttentionKernel
    ) -> tuple[int, Mask, Mask]:
        """Return the first visible path token, the block's mask and the path's mask.

        Args:
            size: queries see the last ``size`` tokens, themselves included; None: all.
            kernel: one that takes path and block at once needs no matrix.
        """
        if size is None or self.depths[1] < size:
            return 0, self.mask, self.path_mask
        shape = self.mask.shape
        joins = kernel.joins_chains and shape is not None and shape.is_chain
        joins = joins or kernel.takes_path
        if (size, joins) not in self._windows:
            self._windows[size, joins] = self._cut_to_window(size, joins)
        return self._windows[size, joins]

    def _cut_to_window(self, size: int, joins: bool) -> tuple[int, Mask, Mask]:
        depth_S, start = self.depth_S, window_start(self.path_tokens, self.depths, size)
        if joins:
            shape, arrays = self.mask.shape, self.mask.arrays
            mask = Mask(shape, window=size, arrays=arrays, depth_S=depth_S)
            return start, mask, self.path_mask
        visible_SS = self.mask.visible(len(depth_S), depth_S.device)
        assert visible_SS is not None
        visible_SS = visible_SS & (depth_S[:, None] - depth_S[None] < size)
        depth_P = torch.arange(start, self.path_tokens, device=depth_S.device)
        visible_SP = depth_S[:, None] - depth_P[None] < size
        return start, Mask(visible=visible_SS), Mask(visible=visible_SP)


def window_start(path_tokens: int, depths: tuple[int, int], size: int | None) -> int:
    """Return the first path token that a block at ``depths`` sees."""
    return 0 if size is None else min(path_tokens, max(0, depths[0] - size + 1))


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """How one layer attends in one block."""

    layer: LayerPath
    path_start: int
    """First path token that any query sees: 0 without a sliding window."""
    path_end: int
    """Tokens of the path; no path term if it equals ``path_start``."""
    block_mask: Mask
    path_mask: Mask
    scoring: Scoring
    kernel: AttentionKernel

    def terms(self, k: Tensor, v: Tensor) -> list[tuple[int, Term]]:
        """Key sets that cover all a query may see, each key once.

        Returns:
            Per term the number of its keys that belong to the path; they come first.
        """
        num_path = self.path_end - self.path_start
        if self.kernel.takes_path:  # which adds the path's gradients itself
            path = self.layer.keys(self.path_start, self.path_end) if num_path else None
            return [(0, Term(k, v, self.block_mask, self.scoring, path))]
        shape, scoring = self.block_mask.shape, self.scoring
        if (
            num_path
            and self.kernel.joins_chains
            and shape is not None
            and shape.is_chain
            and self.path_mask.matrix is None
        ):
            both = self.layer.extended(self.path_start, self.path_end, k, v)
            return [(num_path, Term(*both, self.block_mask, scoring))]
        terms = [(0, Term(k, v, self.block_mask, scoring))]
        if num_path:
            above = self.layer.read(self.path_start, self.path_end)
            terms.append((num_path, Term(*above, self.path_mask, scoring)))
        return terms


class _PathAttention(torch.autograd.Function):
    """q, out: [1, N, S, H]; k, v of the block: [1, K, S, H]; sinks: [N] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_N: Tensor | None,
        call: _LayerCall,
    ) -> Tensor:
        # Merge the terms by their log-sum-exps.
        (_, first), *others = call.terms(k, v)
        out, lse = call.kernel.forward(q, first)
        for _, term in others:
            out, lse = merge(out, lse, *call.kernel.forward(q, term))
        # The sink: one more key, of value 0, so it only takes weight.
        if sinks_N is not None:
            without = lse
            lse = torch.logaddexp(lse, sinks_N.to(lse.dtype)[None, :, None])
            weight = torch.exp(without - lse).unsqueeze(-1)
            out = out.to(lse.dtype) * weight
        out = out.to(q.dtype)  # rounded once
        ctx.save_for_backward(q, k, v, sinks_N, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, sinks_N, out, lse = ctx.saved_tensors
        call: _LayerCall = ctx.call
        # Each term's gradients, exact because out and lse are of all terms.
        grad_q, grad_k, grad_v = None, None, None
        for num_path, term in call.terms(k, v):
            grad = call.kernel.backward(grads[0], q, out, lse, term)
            grad_q = grad[0] if grad_q is None else grad_q + grad[0]
            # Path keys come first: their part goes to the path's accumulators.
            if num_path:
                above = (x[:, :, :num_path] for x in grad[1:])
                call.layer.add_gradients(call.path_start, *above)
            if num_path < term.k.shape[2]:
                grad_k, grad_v = (x[:, :, num_path:] for x in grad[1:])
        assert grad_k is not None and grad_v is not None
        grad_sinks_N = None
        if sinks_N is not None:
            weight = torch.exp(sinks_N.to(lse.dtype)[None, :, None] - lse)
            delta = (grads[0].to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            grad_sinks_N = -(weight * delta).sum((0, 2)).to(sinks_N.dtype)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks_N, None


_active_block: ContextVar[BlockAttention | None] = ContextVar(
    "areal_dta_active_block", default=None
)


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
    """Attention function that Transformers calls in each layer; returns [1, S, N, H].

    query: [1, N, S, H]; key, value: [1, K, S, H].
    """
    block = _active_block.get()
    if block is None:
        raise RuntimeError(
            f"attention {ATTENTION_NAME!r} was called outside a TreeExecutor: "
            "a layer that is checkpointed runs again in the backward; switch that off. "
            "Elsewhere, restore the model with `model.set_attn_implementation('sdpa')`"
        )
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
    rows = block.needed_rows
    if rows is not None and rows.layer_idx != layer_idx:
        rows = None
    if rows is not None and rows.out is not None:  # the second run of the last layer
        return rows.out.index_select(1, rows.row_R), None
    check_attention_call(
        module, query, key, len(block.depth_S), attention_mask, dropout, kwargs
    )
    layer = block.layers.get(layer_idx)
    asked = requested(scaling, kwargs)
    if layer is None or asked != layer.asked:
        raise UnsupportedModelError(
            f"{layer_name(module)} cannot run on a prefix tree: it asks for (scaling, "
            f"sliding_window, softcap, has sinks) = {asked}, at the first call it was "
            f"{layer.asked if layer else 'not there'}; {REMEDY}"
        )
    block.num_calls += 1
    if block.keep_kv:
        block.keys[layer_idx], block.values[layer_idx] = key, value
    out = attend(block, layer_idx, layer, query, key, value, kwargs.get("s_aux"))
    if rows is not None:
        rows.end_first_run(out)
    return out, None


def attend(
    block: BlockAttention,
    layer_idx: int,
    layer: LayerAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_N: Tensor | None,
) -> Tensor:
    """Return attention of a block's queries to its path and itself, [1, S, N, H]."""
    scoring = Scoring(scale=layer.scale, softcap=layer.softcap)
    kernel = select_kernel(block.kernel_name, query, key, value, scoring)
    path_start, block_mask, path_mask = block.window(layer.window, kernel)
    if path_mask.matrix is not None:
        # With a sliding window a query may see nothing of the path, which flash
        # kernels do not take.
        kernel = KERNELS["masked_softmax"]
    call = _LayerCall(
        layer=block.path.layers[layer_idx],
        path_start=path_start,
        path_end=block.path_tokens,
        block_mask=block_mask,
        path_mask=path_mask,
        scoring=scoring,
        kernel=kernel,
    )
    out: Tensor = _PathAttention.apply(query, key, value, sinks_N, call)
    # Contiguous as that of Transformers' functions: models take views of it.
    return out.transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION_NAME, _block_attention)


@contextmanager
def model_attention(
    model: PreTrainedModel, name: str = ATTENTION_NAME
) -> Iterator[None]:
    """Give the model an attention by name, ours; restore its own at the end."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


@contextmanager
def active_block(block: BlockAttention, num_layers: int) -> Iterator[None]:
    """Context manager for one model call on ``block``.

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
            "expected one call per layer: the model mixes tokens outside attention "
            "(SSM, linear attention) or has its own attention code. Use the dense "
            "engine (actor.backend=fsdp:…) for it"
        )
