"""Preference pairs on the tree engine: DPO and reward models.

Two consecutive rows are a pair, the chosen one first. A pair stays in one micro-batch
and on one rank.
"""

from __future__ import annotations

from typing import Any

from areal.engine.fsdp_engine import FSDPDPOEngine

from areal_dta.areal_fixes.reward_model import PairRewards
from areal_dta.engine.algorithm_engine import AlgorithmEngine, Trajectories
from areal_dta.engine.positions import Alignment, ReadRule

_PAIR = 2


class DTADPOEngine(AlgorithmEngine, FSDPDPOEngine):
    """Also its own reference, of which only ``compute_logp`` is called."""

    def train_dpo(self, data: Trajectories) -> None:
        self._with_some_rows(super().train_dpo, data, _PAIR)

    def evaluate_dpo(self, data: Trajectories) -> None:
        self._with_some_rows(super().evaluate_dpo, data, _PAIR)

    def compute_logp(self, data: Trajectories) -> Any:
        """Logprobs where the (token-aligned) loss mask is set, 0 elsewhere."""
        with self._forward_reads_only(ReadRule(Alignment.TOKEN)):
            return super().compute_logp(data)


class DTARWEngine(AlgorithmEngine, PairRewards):
    needs_values = True

    def train_rw(self, data: Trajectories) -> None:
        self._with_some_rows(super().train_rw, data, _PAIR)

    def evaluate_rw(self, data: Trajectories) -> None:
        self._with_some_rows(super().evaluate_rw, data, _PAIR)
