"""A workload on a device, with the one loss that every variant takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from areal_dta.tree import PrefixTree
from bench.workloads import BoolArray, Workload


class Work:
    """The loss is the sum over the sequences of a random weight times the logprobs at
    the loss positions, over the number of loss tokens."""

    def __init__(
        self, workload: Workload, weights: Sequence[float], device: torch.device
    ) -> None:
        self.workload = workload
        self.weights = list(weights)
        self.device = device
        self.tree = PrefixTree.from_sequences(workload.sequences)
        self.tokens = [torch.from_numpy(s).to(device) for s in workload.sequences]
        self.positions: list[BoolArray] = [m[1:] for m in workload.loss_masks]
        """Per sequence [len-1], true where entry t (of token t+1) is read."""
        self._read = [
            torch.from_numpy(np.flatnonzero(p)).to(device) for p in self.positions
        ]
        self._scale = 1.0 / max(1, workload.num_loss_tokens)

    @classmethod
    def of(cls, workload: Workload, device: torch.device, seed: int) -> Work:
        rng = np.random.default_rng(seed)
        weights = rng.standard_normal(len(workload.sequences)).tolist()
        return cls(workload, weights, device)

    @property
    def num_sequences(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        return [len(s) for s in self.workload.sequences]

    def loss(self, index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """Of sequence ``index``, from its logprobs [len-1]."""
        return logprobs[self._read[index]].sum() * (self.weights[index] * self._scale)

    def subset(self, indices: Sequence[int]) -> Work:
        """Some of the sequences with their weights, as work of its own."""
        if list(indices) == list(range(self.num_sequences)):
            return self
        weights = [self.weights[i] for i in indices]
        return Work(self.workload.subset(indices), weights, self.device)
