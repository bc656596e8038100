"""A record per training step: what AReaL commits, the batch as a tree, the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from areal.utils import stats_tracker

from areal_dta.areal_fixes.registry import wrapped
from areal_dta.report.batch_sharing import BatchMeter
from areal_dta.report.step_metrics import BatchShape, StepMetrics, step_metrics

if TYPE_CHECKING:
    from areal_dta.trainers.batch_pages import BatchPages


class StepRecorder:
    """Measures the batches of a trainer, and collects what its steps commit.

    Args:
        on_step: called after each step with its record.
        meter: measures each batch as a prefix tree; None leaves those values out.
        pages: writes a page on some batches; None: on none.
    """

    def __init__(
        self,
        on_step: Callable[[StepMetrics], None] | None = None,
        meter: BatchMeter | None = None,
        pages: BatchPages | None = None,
    ) -> None:
        self._on_step = on_step
        self._pages = pages
        self._meter = meter
        self._shape: BatchShape | None = None
        self._meter_seconds = 0.0
        self.restart_clock()

    def take_meter_seconds(self) -> float:
        """Return the seconds spent on measuring batches since the last call."""
        seconds, self._meter_seconds = self._meter_seconds, 0.0
        return seconds

    def restart_clock(self) -> None:
        """Let the current step begin now."""
        self._started = time.monotonic()

    def watch_batches(
        self, controller: Any, method: str
    ) -> AbstractContextManager[None]:
        """Measure each batch on its way while the context is active.

        Args:
            method: the controller's method that returns the batch of a step
                (``prepare_batch``), or takes it (``train_lm`` and the like).
        """

        def measured(call: Callable[..., Any]) -> Callable[..., Any]:
            def returned(*args: Any, **kwargs: Any) -> Any:
                batch = call(*args, **kwargs)
                self._measure(batch)
                return batch

            def taken(batch: Any, *args: Any, **kwargs: Any) -> Any:
                self._measure(batch)
                return call(batch, *args, **kwargs)

            return returned if method == "prepare_batch" else taken

        return wrapped(controller, method, measured)

    @contextmanager
    def step(
        self,
        number: int,
        stats_logger: Any,
        more: Callable[[], Mapping[str, float]],
    ) -> Iterator[None]:
        """Record what AReaL commits while the context is active, then end the step.

        Args:
            number: of the step, counted from 1.
            stats_logger: AReaL's.
            more: returns statistics to commit beside those of AReaL's trainer.
        """
        shape = self._shape
        if shape is not None:  # so that AReaL's own loggers get them as well
            stats_tracker.scalar(
                **{
                    "batch/sequence_tokens": shape.sequence_tokens,
                    "batch/tree_tokens": shape.tree_tokens,
                    "batch/sharing_ratio": shape.sharing_ratio,
                }
            )
        committed: dict[str, float] = {}

        def tee(commit: Callable[..., None]) -> Callable[..., None]:
            def commit_more(epoch: int, step: int, global_step: int, data: Any) -> None:
                items = [data] if isinstance(data, dict) else list(data)
                items[0] = {**items[0], **more()}
                for item in items:
                    committed.update(item)
                commit(epoch, step, global_step, items)

            return commit_more

        with wrapped(stats_logger, "commit", tee):
            yield
        seconds = time.monotonic() - self._started
        self.restart_clock()
        if self._on_step is not None:
            self._on_step(step_metrics(number, committed, shape, seconds))

    def _measure(self, batch: Any) -> None:
        started = time.perf_counter()
        self._shape = self._meter.measure(batch) if self._meter else None
        if self._pages is not None:
            self._pages.see(batch)
        self._meter_seconds += time.perf_counter() - started
