"""A run as PNGs: its rewards, else losses, by step; and the seconds of its steps."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from areal_dta.report.step_metrics import StepMetrics

WINDOW_STEPS = 5
CURVES: Final = {
    "reward": ("mean reward of the batch", "lower right"),
    "loss": ("loss", "upper right"),
}
"""Values of a step that can be drawn: label of the axis, place of the legend."""
WAITS: Final = {
    "rollout": "batch not ready",
    "policy_too_old": "policy would be too old",
    "plan": "collector and plan",
    "workers": "ranks compute",
    "weights": "weight update",
}
"""Reasons for which a trainer waits, and their labels."""


def running_mean(values: Sequence[float], window: int = WINDOW_STEPS) -> list[float]:
    """Return the mean of each value with up to ``window - 1`` before it."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def plot_curve(
    steps: Sequence[StepMetrics], path: Path, name: str, title: str = "", note: str = ""
) -> bool:
    """Draw one of CURVES by step, with its running mean.

    Args:
        note: printed under the curve, e.g. what a rise means and what it does not.

    Returns:
        False, and no file is written, if no step has the value.
    """
    points = [(m.step, y) for m in steps if (y := getattr(m, name)) is not None]
    if not points:
        return False
    # Agg through the object interface: needs no display and no global backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    label, legend = CURVES[name]
    xs, ys = zip(*points, strict=True)
    figure = Figure(figsize=(7.0, 4.5), dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(xs, ys, "o-", color="0.7", markersize=3, linewidth=1, label="step")
    axes.plot(
        xs,
        running_mean(ys),
        color="tab:blue",
        linewidth=2,
        label=f"mean of the last {WINDOW_STEPS}",
    )
    axes.set(xlabel="step", ylabel=label, title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc=legend, frameon=False)
    caption = "\n".join(textwrap.wrap(note, width=125))
    bottom = 0.02 + 0.035 * (caption.count("\n") + 1) if caption else 0.0
    figure.text(0.02, 0.015, caption, fontsize=7.5, color="0.3", va="bottom")
    figure.tight_layout(rect=(0.0, bottom, 1.0, 1.0))
    figure.savefig(path)
    return True


def plot_waits(steps: Sequence[StepMetrics], path: Path, title: str = "") -> bool:
    """Draw the seconds of each step, stacked by what the trainer waits for.

    Returns:
        False, and no file is written, if no step has them.
    """
    known = [m for m in steps if m.wait and m.step_seconds is not None]
    if not known:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    waits = [[m.wait.get(f"wait/{name}", 0.0) for m in known] for name in WAITS]
    spent = [sum(of_step) for of_step in zip(*waits, strict=True)]
    rest = [
        max(0.0, (m.step_seconds or 0.0) - seconds)
        for m, seconds in zip(known, spent, strict=True)
    ]
    axes.stackplot(
        [m.step for m in known],
        *waits,
        rest,
        labels=[*WAITS.values(), "the trainer's own work"],
    )
    axes.set(xlabel="step", ylabel="seconds", title=title, ylim=(0.0, None))
    axes.legend(loc="upper right", frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    return True
