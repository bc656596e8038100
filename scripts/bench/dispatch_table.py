"""What was planned and measured, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.table import markdown_table

LEGEND = """\
Makespan: seconds of the slowest rank; ideal: the whole batch on one rank, over the
number of ranks, so nothing repeated and all equally busy. Repeated tokens: tree tokens
of all ranks beyond those of one tree. Planning seconds are those of all candidates.
tokens: whole prompts balanced by sequence tokens (AReaL); tree_tokens: whole prompts,
first-fit decreasing by tree tokens; contiguous: cuts of the depth-first order; ours:
the best of these after moves. Measured: median over the repeats of the slowest rank's
seconds; predicted by a model that has seen the blocks of one other plan alone."""

METHODS = ("tokens", "tree_tokens", "contiguous", "ours")


@dataclass(frozen=True, slots=True)
class Simulated:
    """One batch on one number of ranks."""

    batch: str
    num_sequences: int
    num_tree_tokens: int
    num_ranks: int
    over_ideal: dict[str, float]
    """Makespan over the ideal, of each method."""
    repeated_tokens: dict[str, int]
    imbalance: float
    """Slowest rank over the mean, of our plan."""
    planning_seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One plan on real ranks."""

    num_ranks: int
    method: str
    predicted_seconds: list[float]
    """One entry per rank."""
    measured_seconds: list[float]
    """Medians over the repeats, one per rank."""
    makespan_seconds: float
    num_tree_tokens: int
    num_blocks_learned: int
    block_error: float
    """Median relative error of the predicted seconds of single blocks."""
    gradient_norm: float

    @property
    def predicted_makespan(self) -> float:
        return max(self.predicted_seconds)


def simulated_table(rows: Sequence[Simulated]) -> str:
    titles = ["batch", "sequences", "ranks"]
    titles += [f"{m}: makespan / ideal" for m in METHODS]
    titles += ["tokens: repeated", "ours: repeated", "ours: slowest / mean", "plan s"]
    table = []
    for r in rows:
        cells = [r.batch, f"{r.num_sequences:,}", f"{r.num_ranks:,}"]
        cells += [f"{r.over_ideal[m]:.3f}" for m in METHODS]
        for method in ("tokens", "ours"):
            cells.append(f"{r.repeated_tokens[method] / r.num_tree_tokens:.1%}")
        cells += [f"{r.imbalance:.3f}", f"{r.planning_seconds:.2f}"]
        table.append(cells)
    return markdown_table(titles, table)


def measured_table(rows: Sequence[Measured]) -> str:
    titles = ["ranks", "plan", "tree tokens", "predicted s", "measured s"]
    titles += ["measured / predicted", "slowest / mean, measured"]
    titles += ["blocks learned from", "median block error", "gradient norm"]
    table = []
    for r in rows:
        mean = sum(r.measured_seconds) / len(r.measured_seconds)
        cells = [str(r.num_ranks), r.method, f"{r.num_tree_tokens:,}"]
        cells += [f"{r.predicted_makespan:.2f}", f"{r.makespan_seconds:.2f}"]
        cells.append(f"{r.makespan_seconds / r.predicted_makespan:.2f}")
        cells.append(f"{max(r.measured_seconds) / mean:.3f}")
        cells += [f"{r.num_blocks_learned}", f"{r.block_error:.1%}"]
        cells.append(f"{r.gradient_norm:.6g}")
        table.append(cells)
    return markdown_table(titles, table, left=(1,))
