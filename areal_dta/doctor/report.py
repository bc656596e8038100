"""The doctor's tables and its verdict, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from areal_dta.doctor.choice import ModelChoice
from areal_dta.doctor.machine import PACKAGES, Finding, Machine
from areal_dta.doctor.parity import Parity
from areal_dta.doctor.timing import Timing, describe_shape

_WIDTH = 80
_GIB = 2**30


class Printer:
    """Prints each part as it is known."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console()
        if console.width > _WIDTH:
            console.width = _WIDTH
        self._console = console

    def machine(self, machine: Machine) -> None:
        rows = [
            ("processor", f"{machine.processor}, {machine.cores} cores"),
            ("memory", f"{machine.memory_bytes / _GIB:.0f} GiB"),
        ]
        for card in machine.cards:
            capability = ".".join(map(str, card.capability))
            free, total = card.free_bytes / _GIB, card.total_bytes / _GIB
            rows.append(
                (
                    "GPU",
                    f"{card.name}, compute capability {capability}, "
                    f"{free:.0f} of {total:.0f} GiB free",
                )
            )
        if not machine.cards:
            rows.append(("GPU", "none that torch can use"))
        rows.append(("CUDA of torch", machine.torch_cuda or "built without"))
        rows.append(("flash attention", "in torch" if machine.has_flash else "none"))
        rows.append(("NCCL", machine.nccl or "-"))
        rows.append(("Python", machine.python))
        rows += [(name, machine.versions.get(name, "-")) for name in PACKAGES]
        self._table("This machine", ("", ""), rows)

    def parity(self, checks: Sequence[Parity], device: str) -> None:
        rows = []
        for check in checks:
            error = "-" if check.error is None else f"{check.error:.1e}"
            verdict = "WRONG" if check.failure else "right"
            if check.error is None and not check.failure:
                verdict = "-"
            detail = check.failure or check.note
            rows.append((check.name, check.dtype, error, verdict, detail))
        title = f"Results on {device} against the truth (relative error)"
        self._table(title, ("what", "dtype", "error", "", ""), rows)

    def timings(self, timings: Sequence[Timing], device: str) -> None:
        rows = []
        for timing in timings:
            seconds, rate = timing.seconds, timing.tokens_per_second
            rows.append(
                (
                    f"{timing.num_tokens:,}",
                    "-" if seconds is None else f"{seconds * 1e3:,.1f}",
                    timing.note if rate is None else f"{rate:,.0f}",
                )
            )
        title = f"One block, forward and backward ({describe_shape(device)})"
        self._table(title, ("tokens", "ms", "tokens/s"), rows)

    def choice(self, choice: ModelChoice) -> None:
        rows = []
        for row in choice.chosen:
            gib = row.predicted_bytes / _GIB
            fits = "" if row.fits else " (too much)"
            rows.append(
                (
                    row.card,
                    str(row.ranks),
                    row.reshard,
                    f"{row.path_tokens:,}",
                    f"{row.block_tokens:,}",
                    f"{row.retain_tokens:,}",
                    f"{gib:,.0f} of {row.usable_bytes / _GIB:,.0f}{fits}",
                )
            )
        title = (
            f"What auto would choose: {choice.architecture}, "
            f"{choice.num_parameters / 1e9:.2f} B, {choice.kernels}"
        )
        columns = ("card", "ranks", "reshard", "path", "block", "retain", "GiB")
        if rows:
            self._table(title, columns, rows)

    def verdict(
        self, findings: Sequence[Finding], machine: Machine, device: str
    ) -> None:
        say = self._console.print
        problems = [f for f in findings if f.is_problem]
        for finding in findings:
            mark = "wrong:" if finding.is_problem else "note:"
            say(f"{mark} {finding.text}", markup=False, highlight=False, soft_wrap=True)
        if problems:
            noun = "problem" if len(problems) == 1 else "problems"
            say(f"Not ready: {len(problems)} {noun}, see above.", highlight=False)
            return
        where = machine.cards[0].name if device == "cuda" else "this CPU"
        say(
            f"Ready: prefix trees on {where} give the gradients of training one "
            "sequence at a time.",
            highlight=False,
        )

    def _table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        table.show_header = any(columns)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*map(str, row))
        self._console.print(table, markup=False)
