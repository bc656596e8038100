"""Normalisation of rewards and advantages per item, without leaving a peer waiting.

Made for AReaL 1.0.4, whose ``Normalization`` slices the concatenated rows by a fixed
``group_size``: items of other sizes are mixed, and the rows at the tail get a spread of
zero. Here each item (the rows of one prompt) is normalised over its own rows, which is
AReaL's result where every item has ``group_size`` rows. A trajectory of several
sequences (rows) counts its reward once, whatever the level.

AReaL also returns before its all-reduces if this rank's mask is zero everywhere, and
the other ranks wait for it. Here such a rank adds zero to the sums.

Used by our engines alone, in place of the ``Normalization`` of their algorithm.
"""

# B = rows, G = trajectories, T = tokens

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from areal.utils.data import Normalization
from torch import Tensor

TRAJECTORY_STARTS = "begin_of_trajectory"
"""AReaL's key: rows [B] that begin a trajectory; those up to the next belong to it."""


class ItemNormalization(Normalization):
    """Normalises over items of any sizes, set by `items`; else over AReaL's groups.

    Never leaves its peers waiting.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._num_rows: list[int] | None = None
        self._trajectory_of_B: Tensor | None = None

    @contextmanager
    def items(self, items: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Context manager: calls are about the concatenated rows of these items."""
        self._num_rows = [len(item["attention_mask"]) for item in items]
        if items and all(TRAJECTORY_STARTS in item for item in items):
            starts = [item[TRAJECTORY_STARTS] for item in items]
            self._trajectory_of_B = trajectory_numbers(starts)
        try:
            yield
        finally:
            self._num_rows = self._trajectory_of_B = None

    def join(
        self, device: torch.device, high_precision: bool = True, group: Any = None
    ) -> None:
        """Take part in the all-reduces of a call without adding anything."""
        if not dist.is_initialized():
            return
        dtype = torch.float64 if high_precision else torch.float32
        for level in (self.mean_level, self.std_level):
            for _ in range(2 if level == "batch" else 0):  # a count, then a sum
                zero = torch.zeros(1, dtype=dtype, device=device)
                dist.all_reduce(zero, group=group)

    def __call__(
        self,
        x: Tensor,
        loss_mask: Tensor | None = None,
        high_precision: bool = True,
        reduce_group: Any = None,
    ) -> Tensor:
        if loss_mask is not None and not loss_mask.any():
            self.join(x.device, high_precision, reduce_group)
            return x.float()
        sizes = self._num_rows
        if sizes is None:
            return super().__call__(x, loss_mask, high_precision, reduce_group)
        if loss_mask is None and self._trajectory_of_B is not None:
            return self._by_trajectory(x, sizes, high_precision, reduce_group)
        mean, std = self._statistics(x, loss_mask, sizes, high_precision, reduce_group)
        centred = x - mean
        if loss_mask is not None:
            centred = centred * loss_mask
        return (centred / std).float()

    def _by_trajectory(
        self, x_B: Tensor, sizes: list[int], high_precision: bool, group: Any
    ) -> Tensor:
        of_B = self._trajectory_of_B
        assert of_B is not None
        # one reward per trajectory: the mean, where its rows were given different ones
        of_B = of_B.to(x_B.device)
        num = int(of_B.max()) + 1
        counts_G = torch.zeros(num, device=x_B.device).index_add(
            0, of_B, torch.ones_like(x_B, dtype=torch.float32)
        )
        x_G = torch.zeros_like(counts_G).index_add(0, of_B, x_B.float()) / counts_G
        per_item = [int(rows.unique().numel()) for rows in of_B.split(sizes)]
        mean_G, std_G = self._statistics(x_G, None, per_item, high_precision, group)
        return ((x_B - mean_G[of_B]) / std_G[of_B]).float()

    def _statistics(
        self,
        x: Tensor,
        mask: Tensor | None,
        sizes: list[int],
        high_precision: bool,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return mean and divisor per entry, as AReaL computes them."""
        options = {"high_precision": high_precision}
        batch = {"all_reduce": True, "reduce_group": group, **options}
        item = {"all_reduce": False, "reduce_group": None, **options}
        leave_out, unbiased = self.mean_leave1out, self.std_unbiased
        # the mean, over the batch or per item
        mean, std = torch.zeros_like(x), torch.ones_like(x)
        if self.mean_level == "batch":
            found = self._compute_mean(x, mask, leave_one_out=leave_out, **batch)
            mean = found.expand_as(x)
        elif self.mean_level == "group":
            for rows in _slices(sizes):
                if rows.stop - rows.start == 1 and leave_out:
                    continue  # nothing is left: 0
                of_item = None if mask is None else mask[rows]
                found = self._compute_mean(
                    x[rows], of_item, leave_one_out=leave_out, **item
                )
                mean[rows] = found.expand_as(x[rows]).to(mean.dtype)
        # the spread, likewise
        if self.std_level == "batch":
            found = self._compute_std(x, mask, mean, unbiased=unbiased, **batch)
            std = found.expand_as(x)
        elif self.std_level == "group":
            for rows in _slices(sizes):
                if rows.stop - rows.start == 1 and unbiased:
                    continue  # one row has no spread: 1
                of_item = None if mask is None else mask[rows]
                found = self._compute_std(
                    x[rows], of_item, mean[rows], unbiased=unbiased, **item
                )
                std[rows] = found.expand_as(x[rows]).to(std.dtype)
        else:
            return mean, std
        return mean, std + self.eps


def trajectory_numbers(starts: Sequence[Tensor]) -> Tensor:
    """Return the index of each row's trajectory [B], rising along all items.

    Args:
        starts: per item, rows [B] > 0 where a trajectory begins. An item's first row
            begins one in any case.
    """
    begins = []
    for start_B in starts:
        begin_B = start_B.reshape(len(start_B), -1)[:, 0] > 0
        begin_B[:1] = True
        begins.append(begin_B)
    return torch.cat(begins).long().cumsum(0) - 1


def _slices(sizes: Sequence[int]) -> Iterator[slice]:
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size
