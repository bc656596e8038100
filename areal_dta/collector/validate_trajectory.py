"""Check of one accepted result: is it fit to be trained on?

A result is the group of trajectories of one prompt, a dict of padded tensors [B, S];
each row is a sequence. Only token ids go into the forest. Everything else is looked at
once, to keep out what would spoil a training step, and stays on its worker.

`rejections` has the rules.
"""

# B = rows, S = padded width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from areal_dta.collector.rejections import Rejected
from areal_dta.engine.batch import has_images
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

_MAX_IDS: Final = 2**31  # AReaL holds ids as int32
_INTEGERS: Final = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_FLOATS: Final = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_DTYPES: Final = {
    "input_ids": _INTEGERS,
    "versions": _INTEGERS,
    "logprobs": _FLOATS,
    "rewards": _FLOATS | _INTEGERS,
    "attention_mask": _FLOATS | _INTEGERS | {torch.bool},
    "loss_mask": _FLOATS | _INTEGERS | {torch.bool},
}


@dataclass(frozen=True, slots=True)
class Group:
    """The sequences of one prompt."""

    sequences: tuple[NDArray[np.integer], ...]
    needed_outputs: tuple[NDArray[np.int64], ...]
    """Depths of the tokens whose output the loss reads, rising, per sequence."""
    head_version: int | None
    """Policy version of the oldest first generated token; None if not recorded."""
    rewards: tuple[float, ...]
    """One per sequence; empty if not recorded."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def has_loss(self) -> bool:
        return any(map(len, self.needed_outputs))

    def insert_into(self, forest: PrefixForest, group_id: int) -> None:
        pairs = zip(self.sequences, self.needed_outputs, strict=True)
        for row, (tokens, needed) in enumerate(pairs):
            forest.insert((group_id, row), tokens, needed)


def validate_trajectory(
    item: Mapping[str, Any],
    max_tokens: int | None,
    vocab_size: int | None = None,
    version: int | None = None,
) -> Group:
    """Check a result and return its sequences.

    Args:
        item: tensors at hand.
        max_tokens: longest sequence that the trainers accept; None for no limit.
        vocab_size: ids are below it; None where it is not known.
        version: current version of the policy; None where that does not matter.

    Raises:
        Rejected: the result cannot be trained on.
    """
    # Types
    if not isinstance(item, Mapping):
        raise Rejected("dtype", f"a result is a {type(item).__name__}, not a dict")
    if images := has_images(item):
        raise Rejected(
            "images",
            f"it has {', '.join(images)}, and the trainers take text alone",
        )
    given = {key: item[key] for key in FETCHED_KEYS if item.get(key) is not None}
    arrays = {key: _to_array(key, value) for key, value in given.items()}

    # Shapes
    ids_BS, mask_BS = arrays.get("input_ids"), arrays.get("attention_mask")
    if ids_BS is None or mask_BS is None:
        raise Rejected("shape", f"no input_ids and attention_mask, but {list(item)}")
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
    mask_BS = _to_mask("attention_mask", mask_BS)
    lengths = mask_BS.sum(1)
    padded_right = mask_BS == (np.arange(mask_BS.shape[1]) < lengths[:, None])
    if not padded_right.all() or not lengths.all():
        raise Rejected("shape", "a row is empty or not padded on the right")

    # Values; padding may hold anything
    learned_BS = arrays.get("loss_mask", mask_BS)
    _to_mask("loss_mask", learned_BS[mask_BS])
    limit = vocab_size or _MAX_IDS
    ids = ids_BS[mask_BS]
    if ids.min() < 0 or ids.max() >= limit:
        raise Rejected(
            "vocabulary",
            f"token ids from {ids.min()} to {ids.max()}; expected 0 to {limit - 1}",
        )
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

    rows = list(enumerate(lengths.tolist()))
    return Group(
        tuple(ids_BS[b, :length] for b, length in rows),
        tuple(learned_BS[b, 1:length].nonzero()[0] + 1 for b, length in rows),
        _head_version(arrays.get("versions"), mask_BS, version),
        tuple(arrays.get("rewards", np.zeros(0)).astype(float).tolist()),
    )


def _to_array(key: str, value: Any) -> NDArray[Any]:
    """Return a tensor as an array.

    Raises:
        Rejected: it is not a tensor of a fitting type, at hand.
    """
    if not torch.is_tensor(value):
        raise Rejected("dtype", f"{key} is a {type(value).__name__}, not a tensor")
    is_at_hand = value.device.type == "cpu" and value.layout is torch.strided
    if value.dtype not in _DTYPES[key] or not is_at_hand:
        raise Rejected(
            "dtype", f"{key} is {value.dtype} on {value.device} ({value.layout})"
        )
    value = value.detach()
    # NumPy has no bfloat16
    array: NDArray[Any] = (
        value.float() if value.dtype == torch.bfloat16 else value
    ).numpy()
    return array


def _to_mask(key: str, array: NDArray[Any]) -> NDArray[np.bool_]:
    """
    Raises:
        Rejected: it holds other values than 0 and 1.
    """
    mask = array != 0
    if array.dtype != bool and not (array == mask).all():
        raise Rejected("dtype", f"{key} holds other values than 0 and 1")
    return mask


def _head_version(
    versions_BS: NDArray[Any] | None, mask_BS: NDArray[np.bool_], current: int | None
) -> int | None:
    """Versions are -1 where a token was not generated, and rise along a row.

    Raises:
        Rejected: no policy had such a version.
    """
    if versions_BS is None:
        return None
    versions = versions_BS[mask_BS]
    first, last = int(versions.min()), int(versions.max())
    if first < -1 or (current is not None and last > current):
        raise Rejected(
            "version",
            f"versions from {first} to {last}; expected -1 (not generated) to "
            f"{current}, the trainer's",
        )
    if last < 0:
        return None
    return first if first >= 0 else int(versions[versions >= 0].min())
