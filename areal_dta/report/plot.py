"""The curve of a run as a PNG: rewards where there are any, else losses."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from areal_dta.report.step_metrics import StepMetrics

WINDOW_STEPS = 5


def running_mean(values: Sequence[float], window: int = WINDOW_STEPS) -> list[float]:
    """Mean of each value with up to ``window - 1`` before it."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def plot_rewards(
    steps: Sequence[StepMetrics], path: Path, title: str = "", note: str = ""
) -> bool:
    """Draw reward by step with its running mean.

    Args:
        note: printed under the curve, e.g. what a rise means and what it does not.

    Returns:
        False, and no file, if no step has a reward.
    """
    points = [(m.step, m.reward) for m in steps if m.reward is not None]
    return _plot(points, path, "mean reward of the batch", "lower right", title, note)


def plot_losses(
    steps: Sequence[StepMetrics], path: Path, title: str = "", note: str = ""
) -> bool:
    """As `plot_rewards`, of losses."""
    points = [(m.step, m.loss) for m in steps if m.loss is not None]
    return _plot(points, path, "loss", "upper right", title, note)


def _plot(
    points: Sequence[tuple[int, float]],
    path: Path,
    label: str,
    legend: str,
    title: str,
    note: str,
) -> bool:
    if not points:
        return False
    # Agg by way of the object interface: needs no display and no global backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    xs, ys = [x for x, _ in points], [y for _, y in points]
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
