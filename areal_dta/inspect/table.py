"""The report for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

WIDTH: Final = 80
WAYS: Final = {
    "dense": "dense, sequence by sequence",
    "dense_ckpt": "dense, with checkpointing",
    "packed": "packed trees, one mask",
    "dta": "this package",
}
HISTOGRAMS: Final = {
    "branch_tokens": "branches by tokens",
    "fork_depth_tokens": "forks by depth, tokens",
    "forks_per_sequence": "sequences by forks",
    "sequence_tokens": "sequences by tokens",
}
_MAX_FINDINGS = 8
_BAR = 16


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the report; wrapped at the console's width, at most 80 columns."""
    for part in _parts(report):
        console.print(part)
        console.print()


def _parts(report: dict[str, Any]) -> Iterator[RenderableType]:
    yield _sharing(report)
    yield _lost(report["lost_sharing"])
    yield _ways(report)
    yield _histograms(report["histograms"])
    yield _balance(report["balance"])


def _sharing(report: dict[str, Any]) -> RenderableType:
    sharing, source = report["sharing"], report["input"]
    grid = _grid()
    for path, format in list(source.get("files", {}).items())[:4]:
        grid.add_row("file", escape(f"{path} ({format})"))
    if (more := len(source.get("files", {})) - 4) > 0:
        grid.add_row("", f"and {more} more files")
    if source.get("stopped"):
        grid.add_row(
            "[yellow]limit[/]",
            f"[yellow]read up to {escape(source['stopped'])}; the rest of the input is "
            "not in this report[/]",
        )
    for note in source.get("notes", ()):
        grid.add_row("note", escape(note))
    tokens, tree = sharing["num_sequence_tokens"], sharing["num_tree_tokens"]
    grid.add_row("sequences", f"{sharing['num_sequences']:,}")
    longest = f"{tokens:,}, the longest sequence {sharing['longest']:,}"
    if sharing["knows_loss"]:
        share = sharing["num_loss_tokens"] / max(1, tokens)
        longest += f"; {share:.2%} with loss"
    grid.add_row("tokens", longest)
    nodes = f"{sharing['num_nodes']:,} nodes, {sharing['num_leaves']:,} leaves"
    grid.add_row("tree tokens", f"{tree:,} ({nodes})")
    ratio = sharing["sharing_ratio"]
    grid.add_row("sharing", f"[bold]{ratio:.2f}[/] sequence tokens per tree token")
    if not sharing["knows_loss"]:
        grid.add_row(
            "loss", "not known which tokens carry loss: all are counted as if they did"
        )
    return Group(Text("Sharing", style="bold"), grid)


def _lost(lost: dict[str, Any]) -> RenderableType:
    title = Text("Where sharing is lost", style="bold")
    findings = lost["findings"]
    if not findings:
        return Group(
            title,
            Text(
                f"  nowhere that a change of the prompts would mend\n"
                f"  ({lost['num_forks_examined']:,} forks examined; what costs less "
                f"than {lost['min_tokens']:,} tokens is left out)"
            ),
        )
    parts: list[RenderableType] = [title]
    for number, f in enumerate(findings[:_MAX_FINDINGS], start=1):
        grid = _grid(12)
        head = (
            f"[bold]{f['num_tokens']:,} tokens[/] ({f['share_of_tree']:.1%} of the "
            f"tree), at {f['num_forks']:,} fork{'s' * (f['num_forks'] > 1)}"
        )
        parts.append(Text(f"  {number}. {f['kind']}", style="bold"))
        grid.add_row("   costs", head)
        place = f"token {f['position']:,}"
        if f["role"]:
            place += f", in a {f['role']} message"
        grid.add_row("   at", place)
        grid.add_row("   behind", _text(f["before"], tail=True))
        grid.add_row("   one has", _text(f["one"]))
        grid.add_row("   other has", _text(f["other"]))
        grid.add_row("   see", escape(" and ".join(dict.fromkeys(f["where"]))))
        grid.add_row("   change", escape(f["advice"]))
        parts.append(grid)
    if (more := len(findings) - _MAX_FINDINGS) > 0:
        parts.append(Text(f"  and {more} more (--json, --html)"))
    parts.append(
        Text(
            f"  without them: at most {lost['sharing_ratio_without']:.2f} sequence "
            "tokens per tree token"
        )
    )
    if lost["num_comparisons_left_out"]:
        parts.append(
            Text(
                f"  {lost['num_comparisons_left_out']:,} comparisons at smaller forks "
                "were left out"
            )
        )
    return Group(*parts)


def _ways(report: dict[str, Any]) -> RenderableType:
    model, schedule = report["model"], report["schedule"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  way to train this batch")
    for column in ("speed", "PFLOPs", "peak GiB", "calls"):
        table.add_column(column, justify="right")
    for way in report["ways"]:
        style = "bold" if way["name"] == "dta" else ""
        table.add_row(
            f"  {WAYS[way['name']]}",
            f"{way['speed_up_over_dense']:.2f} x",
            f"{way['flops'] / 1e15:,.3g}",
            f"{way['peak_bytes'] / 2**30:,.2f}",
            f"{way['num_calls']:,}",
            style=style,
        )
    retain = schedule["retain_tokens"]
    grid = _grid()
    grid.add_row("block_tokens", f"{schedule['block_tokens']:,}")
    grid.add_row("retain_tokens", "null (all)" if retain is None else f"{retain:,}")
    recomputed = schedule["num_recomputed_tokens"]
    grid.add_row(
        "schedule",
        f"{schedule['num_blocks']:,} blocks; {schedule['num_forward_tokens']:,} "
        f"tokens forward, {recomputed:,} of them again; at most "
        f"{schedule['peak_graph_tokens']:,} with a graph, "
        f"{schedule['peak_kv_tokens']:,} with K/V",
    )
    notes = [
        "Peak: activations, keys and values. Parameters, gradients and optimizer "
        "come on top."
    ]
    if schedule["memory_budget_bytes"] is not None and not schedule["fits"]:
        budget = schedule["memory_budget_bytes"] / 2**30
        notes.insert(
            0,
            f"[yellow]Nothing fits into {budget:.2f} GiB: these are the smallest "
            "budgets.[/]",
        )
    title = (
        f"Prediction for {model['name']} ({model['device']}, {model['element_bytes']} "
        "bytes per value)"
    )
    for note in notes:
        grid.add_row("", note)
    return Group(Text(title, style="bold"), table, grid)


def _histograms(histograms: dict[str, Any]) -> RenderableType:
    columns = []
    for name, title in HISTOGRAMS.items():
        if name == "sequence_tokens":
            continue
        bins = _merged(histograms[name])
        most = max((b["count"] for b in bins), default=1)
        lines = [Text(title, style="bold")]
        for b in bins:
            label = _range(b["from"], b["to"])
            bar = "█" * max(b["count"] > 0, round(b["count"] / most * 6))
            lines.append(Text(f"{label:>9} {b['count']:>6,} {bar}"))
        columns.append(Group(*lines))
    grid = Table.grid(padding=(0, 1))
    for _ in columns:
        grid.add_column(width=25)
    grid.add_row(*columns)
    return grid


def _merged(bins: list[dict[str, int]]) -> list[dict[str, int]]:
    """Merge neighbours until there are at most nine bins."""
    while len(bins) > 9:
        pairs = [bins[i : i + 2] for i in range(0, len(bins), 2)]
        bins = [
            {
                "from": pair[0]["from"],
                "to": pair[-1]["to"],
                "count": sum(b["count"] for b in pair),
            }
            for pair in pairs
        ]
    return bins


def _range(start: int, end: int) -> str:
    def short(n: int) -> str:
        return f"{n // 1024}k" if n >= 1024 else str(n)

    return short(start) if end - start <= 1 else f"{short(start)}-{short(end - 1)}"


def _balance(balance: dict[str, Any]) -> RenderableType:
    num = balance["num_ranks"]
    title = Text(f"Balance over {num} ranks", style="bold")
    grid = _grid()
    tokens = balance["num_tree_tokens"]
    repeated = balance["num_repeated_tokens"] / max(1, tokens)
    grid.add_row("slowest rank", f"{balance['imbalance']:.3f} times the mean")
    grid.add_row("tree tokens", f"{tokens:,} over all ranks ({repeated:.1%} repeated)")
    table = Table.grid(padding=(0, 1))
    most = max((r["share_of_seconds"] for r in balance["ranks"]), default=1.0) or 1.0
    for i, rank in enumerate(balance["ranks"][:16]):
        share = rank["share_of_seconds"]
        table.add_row(
            f"  rank {i:<3}",
            f"{share:6.1%}",
            "█" * round(share / most * _BAR),
            f"{rank['num_sequences']:,} sequences",
        )
    if num > 16:
        table.add_row(f"  and {num - 16} more", "", "", "")
    return Group(title, grid, table)


def _grid(width: int = 14) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=width + 2, no_wrap=False)
    grid.add_column(overflow="fold", max_width=WIDTH - width - 4)
    return _Indented(grid)  # type: ignore[return-value]


class _Indented:
    """Grid whose first column is indented by two spaces."""

    def __init__(self, grid: Table) -> None:
        self._grid = grid

    def add_row(self, first: str, *rest: RenderableType) -> None:
        self._grid.add_row(f"  {first}" if first else "", *rest)

    def __rich__(self) -> Table:
        return self._grid


def _text(text: str, tail: bool = False, limit: int = 110) -> Text:
    """Return a text on one line, its control characters visible, its middle cut."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    if len(shown) > limit:
        shown = f"…{shown[-limit:]}" if tail else f"{shown[:limit]}…"
    return Text(shown or "(nothing)", style="cyan" if shown else "dim")
