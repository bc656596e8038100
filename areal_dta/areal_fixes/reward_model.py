"""AReaL's reward-model engine with two corrections, for dense and tree training.

Made for AReaL 1.0.4, which cannot run it: its ``train_rw`` raises a KeyError. The test
that shows the fault is in tests/engine/test_preference.py; drop this file when AReaL's
own engine passes it. Subclasses: nothing is replaced, so there is nothing to undo.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from areal.engine.fsdp_engine import FSDPRWEngine
from areal.trainer.rw.rw_engine import (
    RWController,
    RWEngine,
    _log_empty_rw_stats,
    _rw_loss_weight,
    compute_rw_loss,
)
from areal.utils import stats_tracker


class PairRWEngine(RWEngine):
    """Counts the pairs of a padded batch by its attention mask.

    AReaL counts them by ``cu_seqlens``, which only packed batches have: a KeyError.
    """

    def _train_rw(self, data: dict[str, Any]) -> None:
        _log_if_no_pairs(data)
        self.engine.train()
        stats = self.engine.train_batch(data, compute_rw_loss, _rw_loss_weight)
        stats_tracker.scalar(**stats)

    def _evaluate_rw(self, data: dict[str, Any]) -> None:
        _log_if_no_pairs(data)
        self.engine.eval()
        self.engine.eval_batch(data, compute_rw_loss, _rw_loss_weight)


class PairRWController(RWController):
    """Keeps pairs on one rank in training too; AReaL does so in evaluation only."""

    def train_rw(self, *args: Any, **kwargs: Any) -> None:
        self._custom_function_call(
            "train_rw", *args, group_size=2, rpc_meta={"broadcast": True}, **kwargs
        )


class PairRewards(FSDPRWEngine):
    """Reward-model engine that counts pairs by the mask and keeps each on a rank."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rw_engine = PairRWEngine(self)

    @classmethod
    def as_controller(cls, config: Any, scheduler: Any) -> Any:
        if config._version != "v1":
            return super().as_controller(config, scheduler)
        return PairRWController(train_engine=cls, config=config, scheduler=scheduler)


def _log_if_no_pairs(data: dict[str, Any]) -> None:
    lengths_B = data["attention_mask"].sum(-1)
    cu_seqlens = F.pad(lengths_B.cumsum(0), (1, 0))
    if _rw_loss_weight({"cu_seqlens": cu_seqlens}) == 0:
        _log_empty_rw_stats(lengths_B.device)
