"""A run as PNGs: rewards or losses, tokens and sharing, and the seconds of its steps.

`draw_run` draws what the run's ``metrics.jsonl`` has values for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from areal_dta.report.step_metrics import StepMetrics, read_metrics

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
_COLORS: Final = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#bbbbbb")


def running_mean(values: Sequence[float], window: int = WINDOW_STEPS) -> list[float]:
    """Return the mean of each value with up to ``window - 1`` before it."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def draw_run(directory: Path, note: str = "") -> list[tuple[str, Path]]:
    """Draw a run's pictures into its directory.

    Args:
        directory: ``<fileroot>/<experiment>/<trial>``, with ``metrics.jsonl``.
        note: printed under the curve, e.g. what a rise means and what it does not.

    Returns:
        Name and path of each picture; those without values are not drawn.
    """
    metrics = directory / "metrics.jsonl"
    if not metrics.exists() or not (steps := read_metrics(metrics)):
        return []
    title = f"{directory.parent.name} / {directory.name}"
    drawn = []
    for name in CURVES:  # beside a reward, a policy's loss says nothing
        path = directory / f"{name}.png"
        if plot_curve(steps, path, name, title, note):
            drawn.append((f"{name} curve", path))
            break
    for name, plot in (
        ("tokens", plot_tokens),
        ("seconds", plot_seconds),
        ("waits", plot_waits),
    ):
        path = directory / f"{name}.png"
        if plot(steps, path, title):
            drawn.append((name, path))
    return drawn


def plot_curve(
    steps: Sequence[StepMetrics], path: Path, name: str, title: str = "", note: str = ""
) -> bool:
    """Draw one of CURVES by step, with its running mean.

    Beside the reward of training stands that of an evaluation set, where there is one.

    Args:
        note: printed under the curve, e.g. what a rise means and what it does not.

    Returns:
        False, and no file is written, if no step has the value.
    """
    points = [(m.step, y) for m in steps if (y := getattr(m, name)) is not None]
    if not points:
        return False
    label, legend = CURVES[name]
    xs, ys = zip(*points, strict=True)
    figure = _figure()
    axes = figure.subplots()
    axes.plot(xs, ys, "o-", color="0.7", markersize=3, linewidth=1, label="step")
    axes.plot(
        xs,
        running_mean(ys),
        color=_COLORS[0],
        linewidth=2,
        label=f"mean of the last {WINDOW_STEPS}",
    )
    evaluated = [(m.step, m.eval_reward) for m in steps if m.eval_reward is not None]
    if name == "reward" and evaluated:
        axes.plot(
            *zip(*evaluated, strict=True),
            "s-",
            color=_COLORS[4],
            label="evaluation set",
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


def plot_tokens(steps: Sequence[StepMetrics], path: Path, title: str = "") -> bool:
    """Draw the tokens of each batch, as sequences and as a tree, and their ratio.

    Returns:
        False, and no file is written, if no batch was measured.
    """
    known = [m for m in steps if m.sequence_tokens and m.tree_tokens]
    if not known:
        return False
    figure = _figure()
    tokens, ratio = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    xs = [m.step for m in known]
    sequences = [float(m.sequence_tokens or 0) for m in known]
    trees = [float(m.tree_tokens or 0) for m in known]
    tokens.plot(xs, sequences, "o-", color=_COLORS[5], markersize=3, label="sequences")
    tokens.plot(xs, trees, "o-", color=_COLORS[0], markersize=3, label="prefix tree")
    tokens.fill_between(xs, trees, sequences, color=_COLORS[0], alpha=0.12)
    tokens.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    tokens.set(ylabel="tokens of the batch", title=title, ylim=(0.0, None))
    tokens.legend(loc="center right", frameon=False)
    shared = [a / b for a, b in zip(sequences, trees, strict=True)]
    ratio.plot(xs, shared, "o-", color=_COLORS[2], markersize=3)
    ratio.set(xlabel="step", ylabel="sharing", ylim=(1.0, 1.1 * max(shared)))
    for axes in (tokens, ratio):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    return True


def plot_seconds(steps: Sequence[StepMetrics], path: Path, title: str = "") -> bool:
    """Draw the seconds of each step, stacked by its parts.

    Returns:
        False, and no file is written, if no step was timed.
    """
    known = [m for m in steps if m.step_seconds and m.train_seconds]
    if not known:
        return False
    logprobs = [m.logprob_seconds or 0.0 for m in known]
    parts = {
        "wait for the batch": [m.rollout_seconds or 0.0 for m in known],
        "logprobs and values": logprobs,
        "update": [
            (m.train_seconds or 0.0) - part
            for m, part in zip(known, logprobs, strict=True)
        ],
        "weights to the servers": [m.update_seconds or 0.0 for m in known],
    }
    parts = {name: values for name, values in parts.items() if any(values)}
    _stack(known, parts, "the rest", path, title)
    return True


def plot_waits(steps: Sequence[StepMetrics], path: Path, title: str = "") -> bool:
    """Draw the seconds of each step, stacked by what the trainer waits for.

    Returns:
        False, and no file is written, if no step has them.
    """
    known = [m for m in steps if m.wait and m.step_seconds is not None]
    if not known:
        return False
    waits = {
        label: [m.wait.get(f"wait/{name}", 0.0) for m in known]
        for name, label in WAITS.items()
    }
    _stack(known, waits, "the trainer's own work", path, title)
    return True


def _stack(
    steps: Sequence[StepMetrics],
    parts: dict[str, list[float]],
    rest_label: str,
    path: Path,
    title: str,
) -> None:
    """Stack parts of the steps' seconds, and what is left of them."""
    spent = [sum(of_step) for of_step in zip(*parts.values(), strict=True)]
    totals = [m.step_seconds or 0.0 for m in steps]
    rest = [max(0.0, a - b) for a, b in zip(totals, spent, strict=True)]
    figure = _figure()
    axes = figure.subplots()
    axes.stackplot(
        [m.step for m in steps],
        *parts.values(),
        rest,
        labels=[*parts, rest_label],
        colors=[*_COLORS[: len(parts)], _COLORS[5]],
    )
    axes.set(xlabel="step", ylabel="seconds", title=title, ylim=(0.0, None))
    # Below the axes: inside, it would hide a first step that takes long.
    figure.legend(loc="lower center", ncols=3, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0.0, 0.1, 1.0, 1.0))
    figure.savefig(path)


def _figure() -> Any:
    """Return a figure that needs no display and no global backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), dpi=130)
    FigureCanvasAgg(figure)
    return figure
