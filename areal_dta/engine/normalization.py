"""Batch-level normalisation in which a rank with nothing to normalise still takes part.

AReaL's ``Normalization`` returns before its all-reduces when this rank's mask is zero
everywhere, and the other ranks wait for it. Here such a rank adds nothing to the sums.
Group-level normalisation has no collectives and is AReaL's, unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from areal.utils.data import Normalization
from torch import Tensor


class CollectiveNormalization(Normalization):
    """AReaL's ``Normalization``, never leaving its peers waiting."""

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
        return super().__call__(x, loss_mask, high_precision, reduce_group)

    def join(
        self, device: torch.device, high_precision: bool = True, group: Any = None
    ) -> None:
        """Take part in the all-reduces of a call, with nothing."""
        if not dist.is_initialized():
            return
        dtype = torch.float64 if high_precision else torch.float32
        for level in (self.mean_level, self.std_level):
            if level == "batch":  # a count, then a sum
                for _ in range(2):
                    dist.all_reduce(
                        torch.zeros(1, dtype=dtype, device=device), group=group
                    )
