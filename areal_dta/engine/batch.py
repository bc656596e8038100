"""A rank's share of a batch: padded rows, micro-batches, loss inputs, needed outputs.

# B = rows, S = padded width, T = packed tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from areal.api.cli_args import MicroBatchSpec
from areal.utils.data import (
    DEFAULT_MAX_TOKENS_PER_MB,
    MicroBatchList,
    TrajBatchMeta,
    allocate_balanced_mbs,
    amend_position_ids,
    concat_batch,
    get_batch_size,
    tensor_container_to,
)
from numpy.typing import NDArray

from areal_dta.executor.layout.upload import upload

BatchInput = list[dict[str, Any]] | dict[str, Any]

IMAGE_KEYS = ("multi_modal_input", "pixel_values", "image_grid_thw", "video_grid_thw")
"""How AReaL's keys of other inputs than text begin."""


class Alignment(Enum):
    """What entry t of a loss mask belongs to.

    As the rollout made it, mask[t] says that token t is learned; PPO's
    ``compute_advantages`` and AReaL's SFT roll it by -1.
    """

    TOKEN = "token"
    """Token t, which output t-1 predicts."""
    OUTPUT = "output"
    """Output t: the logprob of token t+1, or the value after reading token t."""


@dataclass(frozen=True, slots=True)
class OutputRule:
    """Outputs that are needed: those that the loss mask names, the last, or both.

    AReaL's own losses, and what it does with forward-only logprobs, touch no others:
    in agentic RL 0.2-2 % of the tokens.
    """

    mask: Alignment | None
    """None: the loss mask, if there is one, does not decide."""
    last: bool = False
    """The value at each sequence's last token: a score, or what GAE starts from."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """The rows of one rank, and AReaL's division of them into micro-batches."""

    rows: dict[str, Any]
    """Padded tensors [B, S, ...], per-row tensors [B] and whatever else was given; on
    the CPU, because packing reads lengths row by row."""
    lengths: list[int]
    micro_batches: list[list[int]]
    """Indices of the rows of each; disjoint, none empty."""
    meta: TrajBatchMeta | None
    """How to split outputs again when the input was a list of trajectories."""

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def sequences(self) -> tuple[list[np.ndarray], list[int]]:
        """Return the non-empty sequences, and the row of each."""
        if not self.num_rows:
            return [], []
        input_ids_BS = self.rows["input_ids"].numpy()
        row_of = [row for row, length in enumerate(self.lengths) if length]
        return [input_ids_BS[row, : self.lengths[row]] for row in row_of], row_of

    def pack(self, row_ids: list[int], device: torch.device) -> dict[str, Any]:
        """Return the loss input for some rows, with the keys of AReaL's micro-batches.

        Unlike AReaL's, per-row values [B] are cut to the chosen rows as well. To a GPU
        the tensors are copied together.
        """
        chosen = select_rows(self.rows, torch.tensor(row_ids), self.num_rows)
        mask_BS = chosen.pop("attention_mask").bool()
        # All rows at once: AReaL's pack_tensor_dict copies one by one, which for short
        # rows was 4 % of their training.
        kept_T = mask_BS.flatten().nonzero()[:, 0]
        packed = {
            key: value.flatten(0, 1)[kept_T]
            if torch.is_tensor(value)
            and value.ndim >= 2
            and value.shape[:2] == mask_BS.shape
            else value
            for key, value in chosen.items()
        }
        lengths_B = mask_BS.sum(-1, dtype=torch.int32)
        cu_seqlens = F.pad(lengths_B.cumsum(0, dtype=torch.int32), (1, 0))
        packed["cu_seqlens"] = cu_seqlens
        packed = to_device(packed, device)
        packed["max_seqlen"] = int(lengths_B.max())
        packed["max_length_q"] = packed["max_length_k"] = packed["max_seqlen"]
        packed["cu_seq_lens_q"] = packed["cu_seq_lens_k"] = packed["cu_seqlens"]
        packed["use_cache"] = False
        packed["attention_mask"] = {"full_attention": None, "sliding_attention": None}
        return packed

    def pack_outputs(
        self,
        row_ids: list[int],
        output_of: dict[int, torch.Tensor],
        device: torch.device,
    ) -> torch.Tensor:
        """Pack logprobs [len - 1] per row into one tensor, as AReaL does: [len] each.

        The last position of a row has no next token. No loss reads it: AReaL leaves the
        logprob of the next row's first token there, here it is 0. Values, [len]
        already, are packed as they are; rows without an output are 0.
        """
        nothing = torch.zeros(0, device=device)
        outputs = [(output_of.get(row, nothing), self.lengths[row]) for row in row_ids]
        return torch.cat([F.pad(x, (0, length - len(x))) for x, length in outputs])

    def micro_batch_list(self, mb_spec: MicroBatchSpec) -> MicroBatchList:
        """Return AReaL's own form of the micro-batches, for its output helpers."""
        forward = [row for rows in self.micro_batches for row in rows]
        backward = np.empty(self.num_rows, dtype=np.int64)
        backward[forward] = np.arange(self.num_rows)
        return MicroBatchList(
            data=self.rows,
            mb_spec=mb_spec,
            mbs=[],
            group_lens=[sum(self.lengths[r] for r in m) for m in self.micro_batches],
            forward_indices=forward,
            backward_indices=backward.tolist(),
        )


def to_device(packed: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a loss input on a device; to a GPU its tensors are copied together."""
    if device.type != "cpu":
        tensors = {k: x for k, x in packed.items() if torch.is_tensor(x)}
        packed = {**packed, **upload(tensors, device)}
    moved: dict[str, Any] = tensor_container_to(packed, device)
    return moved


def select_rows(
    rows: dict[str, Any], index: torch.Tensor, num_rows: int
) -> dict[str, Any]:
    """Return some rows of every tensor and list that has ``num_rows`` of them."""
    chosen: dict[str, Any] = {}
    for key, value in rows.items():
        if torch.is_tensor(value) and value.ndim and len(value) == num_rows:
            value = value[index]
        elif isinstance(value, list) and len(value) == num_rows:
            value = [value[row] for row in index.tolist()]
        chosen[key] = value
    return chosen


def load_batch(input_: BatchInput, mb_spec: MicroBatchSpec) -> RankBatch:
    """Convert the input of ``train_batch``; it may be ``[]`` or hold no rows.

    Micro-batches are allocated by AReaL's own function, but on this rank alone: ranks
    may have different numbers of them.

    Raises:
        ValueError: the rows are not right-padded, or one exceeds max_tokens_per_mb.
    """
    meta = None
    if isinstance(input_, list):
        given, meta = concat_batch(input_)
    else:
        given = input_
    if get_batch_size(given) == 0:
        return RankBatch({}, [], [], meta)
    missing = {"input_ids", "attention_mask"} - given.keys()
    if missing:
        raise ValueError(
            f"the batch lacks {sorted(missing)}; expected padded [rows, width] "
            f"tensors input_ids and attention_mask, got the keys {sorted(given)}"
        )
    if images := has_images(given):
        raise ValueError(
            f"the batch has images or other inputs than text ({', '.join(images)}), "
            "and the tree engine trains on text alone: leave such rows out of it"
        )
    given = {k: x for k, x in given.items() if not k.startswith(IMAGE_KEYS)}
    rows = tensor_container_to(amend_position_ids(given), "cpu")
    lengths = _right_padded_lengths(rows["attention_mask"])
    return RankBatch(rows, lengths, _allocate(lengths, mb_spec), meta)


def has_images(item: Mapping[str, Any]) -> list[str]:
    """Return the keys under which a batch or a result holds other inputs than text.

    AReaL's ``multi_modal_input`` has a dictionary per row, empty for text.
    """
    given = [k for k in item if isinstance(k, str) and k.startswith(IMAGE_KEYS)]

    def holds(value: Any) -> bool:
        parts = value if isinstance(value, list) else [value]
        return not all(x is None or (isinstance(x, dict) and not x) for x in parts)

    return [key for key in given if holds(item[key])]


def needed_outputs(
    batch: RankBatch, row_of: list[int], rule: OutputRule, is_critic: bool
) -> list[NDArray[np.bool_]] | None:
    """Return a mask of the needed outputs per sequence, [len-1]; [len] for values.

    None, for all, where the rule asks for a loss mask and the batch has none.
    """
    num_fewer = 0 if is_critic else 1
    assert is_critic or not rule.last, "a last token has no logprob"
    if not batch.num_rows:
        return []
    # outputs at the loss mask, shifted where it belongs to tokens; then the last ones
    masks = [np.zeros(batch.lengths[row] - num_fewer, dtype=bool) for row in row_of]
    if rule.mask is not None:
        mask_BS = batch.rows.get("loss_mask")
        if mask_BS is None:
            return None
        mask_BS = mask_BS.bool()
        if rule.mask is Alignment.TOKEN:
            mask_BS = F.pad(mask_BS[:, 1:], (0, 1))
        array_BS = mask_BS.numpy()
        for row, mask in zip(row_of, masks, strict=True):
            mask |= array_BS[row, : len(mask)]
    if rule.last:
        for mask in masks:
            mask[-1] = True
    return masks


def _right_padded_lengths(mask_BS: torch.Tensor) -> list[int]:
    mask_BS = mask_BS.bool()
    lengths_B = mask_BS.sum(-1)
    depth_S = torch.arange(mask_BS.shape[-1], device=mask_BS.device)
    wrong_B = (mask_BS != (depth_S < lengths_B[:, None])).any(-1)
    if wrong_B.any():
        raise ValueError(
            f"rows {wrong_B.nonzero().flatten().tolist()} of attention_mask are not "
            "right-padded; expected the tokens of a row first, then its padding"
        )
    return lengths_B.tolist()


def _allocate(lengths: list[int], mb_spec: MicroBatchSpec) -> list[list[int]]:
    """Return the rows per micro-batch; ``granularity`` neighbours stay together."""
    # groups of rows that stay together, and their tokens
    size = mb_spec.granularity
    if len(lengths) % size:
        raise ValueError(
            f"{len(lengths)} rows on this rank; expected a multiple of "
            f"mb_spec.granularity={size}, so that groups such as pairs stay together"
        )
    totals = [sum(lengths[i : i + size]) for i in range(0, len(lengths), size)]
    limit = mb_spec.max_tokens_per_mb or DEFAULT_MAX_TOKENS_PER_MB
    if max(totals) > limit:
        first = int(np.argmax(totals)) * size
        which = f"row {first}" if size == 1 else f"rows {first} to {first + size - 1}"
        raise ValueError(
            f"mb_spec.max_tokens_per_mb={limit} < {which} "
            f"({max(totals)} tokens): raise it or filter the rollout"
        )
    # A rank may have fewer rows than the number of micro-batches that was asked for.
    num_wanted = min(mb_spec.n_mbs or 1, len(totals))
    num_multiple = mb_spec.n_mbs_divisor if mb_spec.n_mbs_divisor <= num_wanted else 1
    spec = MicroBatchSpec.new(
        mb_spec, n_mbs=num_wanted, max_tokens_per_mb=limit, n_mbs_divisor=num_multiple
    )
    return [
        [row for group in groups for row in range(group * size, (group + 1) * size)]
        for groups in allocate_balanced_mbs(spec, totals)
    ]
