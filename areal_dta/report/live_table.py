"""The live view of a run: a rich table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from areal_dta.report.step_metrics import StepMetrics

SHOWN_STEPS = 12


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: one value per step."""

    title: str
    """Head of the column, with its unit."""
    label: str
    """Name on plain lines."""
    value: Callable[[StepMetrics], float | int | None]
    format: str
    scale: float = 1.0

    def text(self, metrics: StepMetrics) -> str:
        value = self.value(metrics)
        return "-" if value is None else format(value * self.scale, self.format)


_LOSS = Column("loss", "loss", lambda m: m.loss, "+.4f")
_REWARD = Column("reward", "reward", lambda m: m.reward, ".3f")
_ACCURACY = Column("accu-\nracy", "accuracy", lambda m: m.accuracy, ".3f")
_ROLLOUT = Column("rollout\ns", "rollout_s", lambda m: m.rollout_seconds, ".2f")
_TOO_OLD = Column(
    "too old\ns",
    "too_old_s",
    lambda m: m.wait.get("wait/policy_too_old") if m.wait else None,
    ".2f",
)
_TRAIN = Column("train\ns", "train_s", lambda m: m.train_seconds, ".2f")
_UPDATE = Column("update\ns", "update_s", lambda m: m.update_seconds, ".2f")
_STEP = Column("step\ns", "step_s", lambda m: m.step_seconds, ".2f")
_DROPPED = Column(
    "not\ntrained",
    "not_trained",
    lambda m: m.collector.get("collector/dropped") if m.collector else None,
    ",.0f",
)
_HITS = Column(
    "prefix\nhits %",
    "prefix_hits_%",
    lambda m: m.rollout.get("prefix_hit_rate") if m.rollout else None,
    ".0f",
    100.0,
)
_ALARM = Column(
    "verify\nalarm",
    "verify_alarm",
    lambda m: max(
        (v for k, v in (m.verify or {}).items() if "alarm" in k), default=None
    ),
    ".0f",
)
_BATCH = (
    Column("grad\nnorm", "grad_norm", lambda m: m.grad_norm, ".3f"),
    Column("sequence\ntokens", "sequence_tokens", lambda m: m.sequence_tokens, ",.0f"),
    Column("tree\ntokens", "tree_tokens", lambda m: m.tree_tokens, ",.0f"),
    Column("sharing\nratio", "sharing", lambda m: m.sharing_ratio, ".2f"),
    Column("saving\n%", "saving_%", lambda m: m.predicted_saving, ".0f", 100.0),
)
COLUMNS: Final = {
    "ppo": (
        *(_REWARD, _LOSS, *_BATCH),
        *(_DROPPED, _HITS, _ROLLOUT, _TOO_OLD, _TRAIN, _UPDATE, _STEP),
    ),
    "sft": (_LOSS, *_BATCH, _TRAIN, _STEP),
    "dpo": (_LOSS, _ACCURACY, *_BATCH, _TRAIN, _STEP),
    "rw": (_LOSS, _ACCURACY, *_BATCH, _TRAIN, _STEP),
}
"""Keyed by `config.algorithm`."""


class RunView:
    """View of a run's state; a context manager."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console = console
        self._clock = clock
        self._started = clock()
        self._status = "starting"
        self._num_steps: int | None = None
        self._columns: tuple[Column, ...] = COLUMNS["ppo"]
        self._steps: deque[StepMetrics] = deque(maxlen=SHOWN_STEPS)
        self._live: Live | None = None
        if console.is_terminal:
            self._spinner = Spinner("dots")
            self._live = Live(self, console=console, refresh_per_second=4)

    def __enter__(self) -> RunView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._status = ""
        if self._live is not None:
            self._live.stop()

    def message(self, text: str, style: str = "") -> None:
        """Print a line above the table."""
        self._console.print(
            f"[{style}]{escape(text)}[/]" if style else escape(text),
            soft_wrap=True,
            highlight=False,
        )

    def status(self, text: str) -> None:
        """Show what the run is doing now."""
        self._status = text
        if self._live is None:
            self.message(f"[{self._elapsed():.0f} s] {text}")

    def set_run(self, num_steps: int, algorithm: str = "ppo") -> None:
        """Set what is known of the run before its first step."""
        self._num_steps, self._columns = num_steps, COLUMNS[algorithm]

    def step(self, metrics: StepMetrics) -> None:
        self._steps.append(metrics)
        if _ALARM.value(metrics) and _ALARM not in self._columns:
            self._columns = (*self._columns, _ALARM)  # once raised, it stays
        if self._live is None:
            self.message(self._plain_line(metrics))

    def _plain_line(self, metrics: StepMetrics) -> str:
        values = "  ".join(f"{c.label} {c.text(metrics)}" for c in self._columns)
        return f"step {self._step_of(metrics)}  {values}"

    def _step_of(self, metrics: StepMetrics) -> str:
        total = f"/{self._num_steps}" if self._num_steps else ""
        return f"{metrics.step}{total}"

    def _elapsed(self) -> float:
        return self._clock() - self._started

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._steps:
            table = Table(box=None, pad_edge=False, header_style="bold")
            table.add_column("step", justify="right")
            for column in self._columns:
                table.add_column(column.title, justify="right")
            for metrics in self._steps:
                table.add_row(
                    self._step_of(metrics), *(c.text(metrics) for c in self._columns)
                )
            parts.append(table)
        if self._status:
            parts.append(self._status_line())
        return Group(*parts)

    def _status_line(self) -> RenderableType:
        line = Table.grid(padding=(0, 1))
        done = self._steps[-1].step if self._steps else 0
        cells: list[RenderableType] = [self._spinner, Text(f"{self._elapsed():.0f} s")]
        if self._num_steps:
            cells.append(ProgressBar(total=self._num_steps, completed=done, width=24))
        cells.append(Text(self._status))
        line.add_row(*cells)
        return line
