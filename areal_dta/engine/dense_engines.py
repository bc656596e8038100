"""AReaL's dense FSDP engines, made honest where attention ignores packing.

AReaL packs a micro-batch into one row and relies on flash-attention's ``cu_seqlens``
to keep its sequences apart. PyTorch's sdpa and eager attention ignore them, silently:
every sequence after the first sees the ones before it (logprobs wrong by 0.1 to 0.3).
Here they are kept apart under those too, one attention call a sequence; with flash
attention the engine is AReaL's, unchanged.
"""

# T = packed tokens, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

from typing import Any

import torch
from areal.engine.fsdp_engine import (
    FSDPDPOEngine,
    FSDPEngine,
    FSDPLMEngine,
    FSDPPPOActor,
    FSDPPPOCritic,
)
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from areal_dta.areal_fixes.reward_model import PairRewards
from areal_dta.engine.dense_rows import DenseRows
from areal_dta.engine.row_dispatch import DispatchedActor, DispatchedCritic

PACKED_ATTENTION = "areal_dta_packed_sdpa"
_IGNORE_PACKING = ("sdpa", "eager")


class PackedAttention(FSDPEngine):
    """Stands before one of AReaL's engines among the bases of a dense one."""

    def _create_device_model(self) -> None:
        super()._create_device_model()
        if self.config.attn_impl in _IGNORE_PACKING:
            self.model.set_attn_implementation(PACKED_ATTENTION)


class DensePPOActor(DispatchedActor, DenseRows, PackedAttention, FSDPPPOActor):
    """The dense twin of ``DTAPPOActor``: the same results, every sequence computed."""


class DensePPOCritic(DispatchedCritic, DenseRows, PackedAttention, FSDPPPOCritic):
    """The dense twin of ``DTAPPOCritic``."""


class DenseLMEngine(PackedAttention, FSDPLMEngine):
    """The dense twin of ``DTALMEngine``."""


class DenseDPOEngine(PackedAttention, FSDPDPOEngine):
    """The dense twin of ``DTADPOEngine``."""


class DenseRWEngine(PackedAttention, PairRewards):
    """The dense twin of ``DTARWEngine``."""


def _packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """sdpa on each packed sequence. query [1, N, T, H], key, value [1, K, T, H].

    Raises:
        ValueError: the call is not one packed row, or a window would be ignored.
    """
    if cu_seq_lens_q is None or attention_mask is not None or query.shape[0] != 1:
        raise ValueError(
            f"packed attention got a batch of {query.shape[0]}, cu_seq_lens_q "
            f"{'missing' if cu_seq_lens_q is None else 'given'}, attention_mask "
            f"{'missing' if attention_mask is None else 'given'}; expected AReaL's "
            "packed micro-batches: one row with cu_seq_lens_q and no mask"
        )
    lengths = cu_seq_lens_q.diff().tolist()
    if sliding_window is not None and max(lengths) > sliding_window:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens exceeds sliding_window="
            f"{sliding_window}, which sdpa ignores; use attn_impl=flash_attention_2"
        )
    parts = zip(
        query.split(lengths, dim=2),
        key.split(lengths, dim=2),
        value.split(lengths, dim=2),
        strict=True,
    )
    outputs = [
        sdpa_attention_forward(module, q, k, v, None, **kwargs)[0]
        for q, k, v in parts
        if q.shape[2]
    ]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(PACKED_ATTENTION, _packed_sdpa)
