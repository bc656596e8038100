"""Supervised fine-tuning on the tree engine, as AReaL's FSDPLMEngine does it."""

from __future__ import annotations

from areal.engine.fsdp_engine import FSDPLMEngine

from areal_dta.engine.algorithm_engine import AlgorithmEngine, Trajectories


class DTALMEngine(AlgorithmEngine, FSDPLMEngine):
    def train_lm(self, data: Trajectories) -> None:
        self._with_some_rows(super().train_lm, data)

    def evaluate_lm(self, data: Trajectories) -> None:
        self._with_some_rows(super().evaluate_lm, data)
