"""Options of the collector: `config.collector`. A light import.

By default the algorithm's data are AReaL's: its staleness control limits how far
rollouts run ahead (``rollout.max_head_offpolicyness``) and never drops one that has
finished. What cannot be trained on is rejected (`areal_dta/collector/rejections.py` has
the rules), and a run in which too much is rejected stops.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_dta.config.composed import ConfigError


@dataclass
class CollectorOptions:
    """How rollout results are taken in."""

    max_staleness: int | None = None
    """Drop results whose first token is older than this number of versions, and roll
    their prompts out again; null: never, as AReaL."""
    max_rejected_share: float = 0.5
    """Stop the run when a larger share of the last two batches' results could not be
    trained on; 1: never."""
    max_batches_without_result: int | None = 10
    """Stop the run when this many batches' worth of rollouts in a row brought nothing
    to train on, for whatever reason; null: wait for ever."""
    fetch_timeout_seconds: float = 120.0
    """Time limit of one attempt to fetch or free tensors on a worker."""
    refit_costs: bool = True
    """Fit the costs by which rows are divided over ranks to the measured seconds of
    blocks; false: they follow from FLOPs alone, so that the same run divides its rows
    the same way every time (docs/recovery.md)."""

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigError(
                f"collector.max_staleness={self.max_staleness}; expected null or a "
                "number of versions >= 0"
            )
        if not 0 <= self.max_rejected_share <= 1:
            raise ConfigError(
                f"collector.max_rejected_share={self.max_rejected_share}; expected 0 "
                "to 1"
            )
        batches = self.max_batches_without_result
        if batches is not None and batches < 1:
            raise ConfigError(
                f"collector.max_batches_without_result={batches}; expected null or a "
                "number of batches >= 1"
            )
        if not self.fetch_timeout_seconds > 0:
            raise ConfigError(
                f"collector.fetch_timeout_seconds={self.fetch_timeout_seconds}; "
                "expected a positive number of seconds"
            )
