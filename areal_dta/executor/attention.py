"""The hook that gives our attention to a Transformers model."""

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

from areal_dta.executor.kernels import Mask, Scoring, select_backend
from areal_dta.executor.kv_cache import PathCache
from areal_dta.executor.model_support import UnsupportedModelError, check_attention_call
from areal_dta.executor.path_attention import AttentionPlan, path_attention

ATTENTION_NAME = "areal_dta"


@dataclass(slots=True)
class BlockAttention:
    """What the attention of one block needs to know, and what it leaves behind."""

    path: PathCache
    path_tokens: int
    depth_S: Tensor
    """Depth of each token of the block."""
    mask: Mask
    backend_name: str
    keep_kv: bool
    keys: dict[int, Tensor] = field(default_factory=dict)
    """Per layer [1, K, S, H], part of the block's graph; only with ``keep_kv``."""
    values: dict[int, Tensor] = field(default_factory=dict)
    num_calls: int = 0
    _everything: Mask = field(default_factory=Mask)
    _windows: dict[int, tuple[int, Mask, Mask]] = field(default_factory=dict)

    def restart(self) -> None:
        """Forget a call of the model, to run the block once more."""
        self.keys, self.values, self.num_calls = {}, {}, 0

    def window(self, size: int | None) -> tuple[int, Mask, Mask]:
        """First path token seen, block mask and path mask of a layer whose queries
        see the last ``size`` tokens (None: all), themselves included."""
        if size is None:
            return 0, self.mask, self._everything
        if size not in self._windows:
            self._windows[size] = self._cut_to_window(size)
        return self._windows[size]

    def _cut_to_window(self, size: int) -> tuple[int, Mask, Mask]:
        depth_S = self.depth_S
        if int(depth_S.max()) < size:
            return 0, self.mask, self._everything
        visible_SS = self.mask.visible(len(depth_S), depth_S.device)
        assert visible_SS is not None
        visible_SS = visible_SS & (depth_S[:, None] - depth_S[None] < size)
        start = min(self.path_tokens, max(0, int(depth_S.min()) - size + 1))
        depth_P = torch.arange(start, self.path_tokens, device=depth_S.device)
        visible_SP = depth_S[:, None] - depth_P[None] < size
        return start, Mask(visible=visible_SS), Mask(visible=visible_SP)


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
    """What Transformers calls in each layer. Returns [1, S, N, H]."""
    block = _active_block.get()
    if block is None:
        raise RuntimeError(
            f"attention {ATTENTION_NAME!r} was called outside a TreeExecutor; restore "
            "the model with `model.set_attn_implementation('sdpa')`"
        )
    check_attention_call(module, query, attention_mask, dropout, kwargs)
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
    block.num_calls += 1
    if block.keep_kv:
        block.keys[layer_idx], block.values[layer_idx] = key, value
    path_start, block_mask, path_mask = block.window(kwargs.get("sliding_window"))
    scoring = Scoring(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        softcap=kwargs.get("softcap"),
    )
    plan = AttentionPlan(
        layer=block.path.layers[layer_idx],
        path_start=path_start,
        path_end=block.path_tokens,
        block_tokens=query.shape[2],
        block_mask=block_mask,
        path_mask=path_mask,
        scoring=scoring,
        backend=select_backend(
            block.backend_name, query, key, value, scoring, path_mask
        ),
    )
    out = path_attention(query, key, value, kwargs.get("s_aux"), plan)
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
