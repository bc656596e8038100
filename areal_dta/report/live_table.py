"""The live view of a run: a rich table on a terminal, plain lines elsewhere.

On a terminal that is too narrow for the titles and all digits, heads are short and
numbers have three digits: all columns fit into 80. What does not fit even then is left
out, the least important column first.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
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
_UNBOUNDED = 10_000  # columns of a terminal that would hold anything


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: one value per step."""

    title: str
    """Head of the column, with its unit."""
    short: str
    """The same for narrow terminals."""
    label: str
    """Name on plain lines."""
    value: Callable[[StepMetrics], float | int | None]
    format: str
    scale: float = 1.0
    short_format: str = ""
    """Format on narrow terminals; empty: `brief`."""
    rank: int = 0
    """Columns of higher rank are left out first."""

    def text(self, metrics: StepMetrics, is_narrow: bool = False) -> str:
        value = self.value(metrics)
        if value is None:
            return "-"
        value *= self.scale
        if is_narrow and not self.short_format:
            return brief(value)
        return format(value, self.short_format if is_narrow else self.format)


def brief(value: float) -> str:
    """Return a number in at most four characters: 0.25, 12.5, 125, 1.3k, 12k, 1.2M.

    Five if it is negative.
    """
    size = abs(value)
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (math.inf, "G")):
        scaled = size / limit * 1e3 if unit else size
        if scaled < 999.5 or unit == "G":
            break
    if float(value).is_integer() and not unit:
        return f"{value:.0f}"
    decimals = (2, 1, 0) if not unit else (1, 0, 0)
    digits = decimals[0 if scaled < 9.995 else 1 if scaled < 99.95 else 2]
    return f"{'-' if value < 0 else ''}{scaled:.{digits}f}{unit}"


_LOSS = Column("loss", "loss", "loss", lambda m: m.loss, "+.4f", 1.0, "+.3f")
_REWARD = Column("reward", "re-\nward", "reward", lambda m: m.reward, ".3f", 1.0, ".3f")
_ACCURACY = Column(
    "accu-\nracy", "accu-\nracy", "accuracy", lambda m: m.accuracy, ".3f", 1.0, ".3f"
)
_ROLLOUT = Column(
    "rollout\ns", "roll\ns", "rollout_s", lambda m: m.rollout_seconds, ".2f"
)
_TOO_OLD = Column(
    "too old\ns",
    "old\ns",
    "too_old_s",
    lambda m: m.wait.get("wait/policy_too_old") if m.wait else None,
    ".2f",
    rank=3,
)
_TRAIN = Column("train\ns", "trn\ns", "train_s", lambda m: m.train_seconds, ".2f")
_UPDATE = Column(
    "update\ns", "upd\ns", "update_s", lambda m: m.update_seconds, ".2f", rank=2
)
_STEP = Column("step\ns", "step\ns", "step_s", lambda m: m.step_seconds, ".2f")
_DROPPED = Column(
    "not\ntrained",
    "un-\nused",
    "not_trained",
    lambda m: m.collector.get("collector/dropped") if m.collector else None,
    ",.0f",
    rank=4,
)
_HITS = Column(
    "prefix\nhits %",
    "hit\n%",
    "prefix_hits_%",
    lambda m: m.rollout.get("prefix_hit_rate") if m.rollout else None,
    ".0f",
    100.0,
    ".0f",
    rank=5,
)
_ALARM = Column(
    "verify\nalarm",
    "al-\narm",
    "verify_alarm",
    lambda m: max(
        (v for k, v in (m.verify or {}).items() if "alarm" in k), default=None
    ),
    ".0f",
)
_BATCH = (
    Column("grad\nnorm", "grad", "grad_norm", lambda m: m.grad_norm, ".3f", rank=1),
    Column(
        "sequence\ntokens",
        "seq.\ntok.",
        "sequence_tokens",
        lambda m: m.sequence_tokens,
        ",.0f",
    ),
    Column(
        "tree\ntokens", "tree\ntok.", "tree_tokens", lambda m: m.tree_tokens, ",.0f"
    ),
    Column("sharing\nratio", "sha-\nring", "sharing", lambda m: m.sharing_ratio, ".2f"),
    Column(
        "saving\n%",
        "sav\n%",
        "saving_%",
        lambda m: m.predicted_saving,
        ".0f",
        100.0,
        ".0f",
        rank=6,
    ),
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
            parts.append(self._table())
        if self._status:
            parts.append(self._status_line())
        return Group(*parts)

    def _table(self) -> Table:
        """Return the table with as much of each column as the terminal has room for."""
        columns = list(self._columns)
        table = self._table_of(columns, is_narrow=False)
        while columns and self._is_too_wide(table):
            table = self._table_of(columns, is_narrow=True)
            if self._is_too_wide(table):
                columns.remove(max(columns, key=lambda column: column.rank))
        return table

    def _is_too_wide(self, table: Table) -> bool:
        unbounded = self._console.options.update(width=_UNBOUNDED)
        needed = self._console.measure(table, options=unbounded).maximum
        return needed > self._console.width

    def _table_of(self, columns: Sequence[Column], is_narrow: bool) -> Table:
        padding = (0, 1, 0, 0) if is_narrow else (0, 1)
        table = Table(box=None, pad_edge=False, header_style="bold", padding=padding)
        table.add_column("step", justify="right", no_wrap=True)
        for column in columns:
            title = column.short if is_narrow else column.title
            table.add_column(title, justify="right", no_wrap=True)
        for metrics in self._steps:
            step = str(metrics.step) if is_narrow else self._step_of(metrics)
            table.add_row(step, *(c.text(metrics, is_narrow) for c in columns))
        return table

    def _status_line(self) -> RenderableType:
        line = Table.grid(padding=(0, 1))
        done = self._steps[-1].step if self._steps else 0
        cells: list[RenderableType] = [self._spinner, Text(f"{self._elapsed():.0f} s")]
        if self._num_steps:
            cells.append(ProgressBar(total=self._num_steps, completed=done, width=24))
        cells.append(Text(self._status))
        line.add_row(*cells)
        return line
