"""Check of one accepted result: is it fit to be trained on?

A result is the group of trajectories of one prompt, a dict of padded tensors [B, S];
each row is a sequence. Only token ids go into the forest. Everything else is looked at
once, to keep out what would spoil a training step, and stays on its worker.
"""

# B = rows, S = padded width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_dta.tree.prefix_forest import PrefixForest

FETCHED_KEYS = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "rewards",
    "logprobs",
    "versions",
)
"""All that is looked at; those that a result has travel to the controller once."""

REASONS = ("filtered", "shape", "nan", "too_long", "stale")
"""Why a result is not trained on; ``filtered``: by AReaL, or its rollout failed."""


class Rejected(ValueError):
    """A result must not be trained on: one of REASONS, and a message."""

    def __init__(self, reason: str, message: str) -> None:
        assert reason in REASONS
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Group:
    """The sequences of one prompt."""

    sequences: tuple[NDArray[np.int64], ...]
    needed_outputs: tuple[NDArray[np.int64], ...]
    """Per sequence the depths of the tokens whose output the loss reads, rising."""
    head_version: int | None
    """Policy version of the oldest first generated token; None if not recorded."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    def insert_into(self, forest: PrefixForest, group_id: int) -> None:
        pairs = zip(self.sequences, self.needed_outputs, strict=True)
        for row, (tokens, needed) in enumerate(pairs):
            forest.insert((group_id, row), tokens, needed)


def validate_trajectory(item: Mapping[str, Any], max_tokens: int | None) -> Group:
    """Check a result and return its sequences.

    Args:
        item: tensors at hand.
        max_tokens: longest sequence that the trainers accept; None for no limit.

    Raises:
        Rejected: the result cannot be trained on.
    """
    given = {key: item[key] for key in FETCHED_KEYS if torch.is_tensor(item.get(key))}
    arrays = {key: _to_array(value) for key, value in given.items()}

    # Shapes
    ids_BS, mask_BS = arrays.get("input_ids"), arrays.get("attention_mask")
    if ids_BS is None or mask_BS is None:
        raise Rejected("shape", f"no input_ids and attention_mask, but {sorted(item)}")
    if ids_BS.ndim != 2 or mask_BS.shape != ids_BS.shape or not len(ids_BS):
        raise Rejected(
            "shape",
            f"input_ids {list(ids_BS.shape)}, attention_mask {list(mask_BS.shape)}; "
            "expected one shape [rows, width]",
        )
    for key, value in arrays.items():
        expected = ids_BS.shape[:1] if key == "rewards" else ids_BS.shape
        if value.shape != expected:
            raise Rejected(
                "shape", f"{key} {list(value.shape)}; expected {list(expected)}"
            )

    # Padding
    mask_BS = mask_BS.astype(bool)
    lengths = mask_BS.sum(1)
    padded_right = mask_BS == (np.arange(mask_BS.shape[1]) < lengths[:, None])
    if not padded_right.all() or not lengths.all():
        raise Rejected("shape", "a row is empty or not padded on the right")

    # Values; padding may hold anything
    if (ids_BS[mask_BS] < 0).any():
        raise Rejected("shape", "negative token ids")
    for key in ("rewards", "logprobs"):
        value = arrays.get(key, np.zeros(0))
        if not np.isfinite(value if value.ndim == 1 else value[mask_BS]).all():
            raise Rejected("nan", f"{key} holds NaN or infinity")

    # Length
    longest = int(lengths.max())
    if max_tokens is not None and longest > max_tokens:
        raise Rejected(
            "too_long",
            f"a sequence of {longest} tokens; actor.mb_spec.max_tokens_per_mb="
            f"{max_tokens} is the maximum that the trainers take",
        )

    learned_BS = arrays.get("loss_mask", mask_BS)
    rows = list(enumerate(lengths.tolist()))
    return Group(
        tuple(ids_BS[b, :length].astype(np.int64) for b, length in rows),
        tuple(learned_BS[b, 1:length].nonzero()[0] + 1 for b, length in rows),
        _head_version(arrays.get("versions"), mask_BS),
    )


def _to_array(tensor: torch.Tensor) -> NDArray[Any]:
    # NumPy has no bfloat16
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _head_version(
    versions_BS: NDArray[Any] | None, mask_BS: NDArray[np.bool_]
) -> int | None:
    """Versions are -1 where a token was not generated, and rise along a row."""
    if versions_BS is None:
        return None
    generated = versions_BS[mask_BS & (versions_BS >= 0)]
    return int(generated.min()) if len(generated) else None
