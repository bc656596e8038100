"""One accepted result as the collector sees it: what is shared, and what is checked.

A result is the group of trajectories of one prompt, a dict of padded tensors; each row
is a sequence. Only token ids are shared in the forest. Everything else is looked at
once, to keep out what would spoil a training step, and stays where it is.
"""

# B = rows, S = padded width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FETCHED_KEYS = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "rewards",
    "logprobs",
    "versions",
)
"""All that is looked at; what a result has of them travels to the controller once."""

REASONS = ("filtered", "shape", "nan", "too_long", "stale")
"""Why a result is not trained on; ``filtered``: by AReaL, or its rollout failed."""


class Rejected(ValueError):
    """A result that must not be trained on, and why: one of REASONS, and a message."""

    def __init__(self, reason: str, message: str) -> None:
        assert reason in REASONS
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Group:
    """The sequences of one prompt."""

    sequences: tuple[NDArray[np.int64], ...]
    read_tokens: tuple[NDArray[np.int64], ...]
    """Of each sequence the depths of the tokens that are learned."""
    head_version: int | None
    """Policy version of the oldest first generated token; None if not recorded."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


def read_group(item: Mapping[str, Any], max_tokens: int | None) -> Group:
    """Check a result with its tensors at hand.

    Args:
        max_tokens: longest sequence that the trainers accept; None for no limit.

    Raises:
        Rejected: it cannot be trained on.
    """
    ids_BS, mask_BS = item.get("input_ids"), item.get("attention_mask")
    if not (torch.is_tensor(ids_BS) and torch.is_tensor(mask_BS)):
        raise Rejected("shape", f"no input_ids and attention_mask, but {sorted(item)}")
    if ids_BS.ndim != 2 or mask_BS.shape != ids_BS.shape or not len(ids_BS):
        raise Rejected(
            "shape",
            f"input_ids {list(ids_BS.shape)}, attention_mask {list(mask_BS.shape)}; "
            "expected one shape [rows, width]",
        )
    mask_BS = mask_BS.bool()
    lengths = mask_BS.sum(-1)
    depth_S = torch.arange(mask_BS.shape[1])
    if (mask_BS != (depth_S < lengths[:, None])).any() or not lengths.all():
        raise Rejected("shape", "a row is empty or not padded on the right")
    if (ids_BS[mask_BS] < 0).any():
        raise Rejected("shape", "negative token ids")
    _check_sizes(item, ids_BS)
    _check_finite(item, mask_BS)
    longest = int(lengths.max())
    if max_tokens is not None and longest > max_tokens:
        raise Rejected(
            "too_long",
            f"a sequence of {longest} tokens; actor.mb_spec.max_tokens_per_mb="
            f"{max_tokens} is the most that the trainers take",
        )
    learned_BS = item.get("loss_mask", mask_BS).bool() & mask_BS
    rows = range(len(ids_BS))
    ids, learned = ids_BS.numpy(), learned_BS.numpy()
    of_row = lengths.tolist()
    return Group(
        tuple(ids[b, : of_row[b]].astype(np.int64) for b in rows),
        tuple(np.flatnonzero(learned[b, 1 : of_row[b]]) + 1 for b in rows),
        _head_version(item.get("versions"), mask_BS),
    )


def _check_sizes(item: Mapping[str, Any], ids_BS: Tensor) -> None:
    num_rows, width = ids_BS.shape
    for key in FETCHED_KEYS:
        value = item.get(key)
        if not torch.is_tensor(value):
            continue
        expected = (num_rows,) if key == "rewards" else (num_rows, width)
        if tuple(value.shape) != expected:
            raise Rejected(
                "shape", f"{key} {list(value.shape)}; expected {list(expected)}"
            )


def _check_finite(item: Mapping[str, Any], mask_BS: Tensor) -> None:
    for key in ("rewards", "logprobs"):
        value = item.get(key)
        if not torch.is_tensor(value):
            continue
        kept = value if value.ndim == 1 else value[mask_BS]
        if not kept.isfinite().all():
            raise Rejected("nan", f"{key} holds NaN or infinity")


def _head_version(versions_BS: Tensor | None, mask_BS: Tensor) -> int | None:
    """Versions are -1 where a token was not generated, and rise along a row."""
    if versions_BS is None:
        return None
    generated = versions_BS[mask_BS & (versions_BS >= 0)]
    return int(generated.min()) if len(generated) else None
