"""Whole runs compared: from their ``metrics.jsonl`` to a table, data and a plot.

A part of a step that a run does not record (older checkouts do not record all) is None,
and shown as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.table import markdown_table

Record = Mapping[str, Any]

PARTS: Final = ("wait", "logprobs", "train", "update", "other")
"""Parts of a step: waiting for the batch; forward passes for logprobs and values; all
other training, advantages included; sending new weights; the rest."""
BASELINE: Final = "dense"
NUM_LAST: Final = 10
"""Steps of which the last reward is a mean."""
PAPER: Final = (
    "For comparison, the paper of the method (arXiv 2602.00482) reports 1.28x (1.7B) "
    "and 2.28x (8B) end to end, on GPUs and in its own setting."
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one variant on one workload."""

    workload: str
    variant: str
    seed: int
    load_average: float
    """Load average of the machine when the run started."""
    records: Sequence[Record] = field(repr=False)
    """Decoded lines of its ``metrics.jsonl``."""


def step_parts(record: Record) -> dict[str, float | None]:
    """Split the seconds of a step into PARTS.

    Without ``logprob_seconds``, as in 0.1.0, training includes the logprobs.
    """
    logprobs = record.get("logprob_seconds")
    train = record.get("train_seconds")
    if train is not None:
        train -= logprobs or 0.0
    parts = {
        "wait": record.get("rollout_seconds"),
        "logprobs": logprobs,
        "train": train,
        "update": record.get("update_seconds"),
    }
    spent = sum(value for value in parts.values() if value is not None)
    return {**parts, "other": max(0.0, record["step_seconds"] - spent)}


def summarize(runs: Sequence[Run], num_warm_up: int) -> dict[str, Any]:
    """Summarize the runs of one variant on one workload.

    Seconds are medians over the steps of all runs, without the first ones of each;
    rewards are means over its first five and last ten steps.

    Args:
        num_warm_up: steps to leave out at the start of each run.

    Raises:
        ValueError: a run has no step after those.
    """
    kept: list[Record] = []
    for run in runs:
        rest = run.records[num_warm_up:]
        if not rest:
            raise ValueError(
                f"{run.workload}, {run.variant}: {len(run.records)} steps, of which "
                f"{num_warm_up} are warm-up; expected more: raise --steps"
            )
        kept += rest

    def middle(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    splits = [step_parts(record) for record in kept]
    waits = sorted({key for record in kept for key in record.get("wait", {})})
    rewards = [
        [r["reward"] for r in run.records if r["reward"] is not None] for run in runs
    ]
    return {
        "runs": len(runs),
        "steps": len(kept),
        "load_average": [run.load_average for run in runs],
        "step_seconds": middle([r["step_seconds"] for r in kept]),
        **{f"{part}_seconds": middle([s[part] for s in splits]) for part in PARTS},
        "executor_seconds": middle(
            [r.get("collector", {}).get("plan/executor_seconds") for r in kept]
        ),
        "waits": {k: middle([r.get("wait", {}).get(k) for r in kept]) for k in waits},
        "sequence_tokens": middle([r["sequence_tokens"] for r in kept]),
        "tree_tokens": middle([r["tree_tokens"] for r in kept]),
        "prefix_hit_rate": middle(
            [r.get("rollout", {}).get("prefix_hit_rate") for r in kept]
        ),
        "logprob_gap": max(
            (r["logprob_gap"] for r in kept if r.get("logprob_gap") is not None),
            default=None,
        ),
        "first_reward": [sum(r[:5]) / len(r[:5]) for r in rewards if r],
        "last_reward": [sum(r[-NUM_LAST:]) / len(r[-NUM_LAST:]) for r in rewards if r],
    }


def report(runs: Sequence[Run], num_warm_up: int) -> dict[str, Any]:
    """Return plain data: per workload and variant the summary and the raw runs."""
    workloads: dict[str, dict[str, Any]] = {}
    for run in runs:
        variants = workloads.setdefault(run.workload, {})
        if run.variant not in variants:
            same = [
                r
                for r in runs
                if (r.workload, r.variant) == (run.workload, run.variant)
            ]
            summary = summarize(same, num_warm_up)
            variants[run.variant] = {**summary, "raw": [asdict(r) for r in same]}
    for variants in workloads.values():
        dense = variants.get(BASELINE)
        for summary in variants.values():
            for key, name in (("step_seconds", "step_ratio"), ("train", "train_ratio")):
                summary[name] = _ratio(dense, summary, key)
    return workloads


def _ratio(dense: Any, summary: Mapping[str, Any], key: str) -> float | None:
    def seconds(of: Mapping[str, Any]) -> float:
        if key == "step_seconds":
            return float(of[key] or 0.0)
        return float(of["train_seconds"] or 0.0) + float(of["logprobs_seconds"] or 0.0)

    if dense is None or not seconds(summary):
        return None
    return seconds(dense) / seconds(summary)


_COLUMNS: Final = {
    "step s": ("step_seconds", ".2f"),
    "wait for batch s": ("wait_seconds", ".2f"),
    "logprobs s": ("logprobs_seconds", ".2f"),
    "train s": ("train_seconds", ".2f"),
    "of it executor s": ("executor_seconds", ".2f"),
    "weights s": ("update_seconds", ".2f"),
    "other s": ("other_seconds", ".2f"),
    "step, dense / this": ("step_ratio", ".2f"),
    "training, dense / this": ("train_ratio", ".2f"),
    "sequence tokens": ("sequence_tokens", ",.0f"),
    "tree tokens": ("tree_tokens", ",.0f"),
    "prefix hits": ("prefix_hit_rate", ".2f"),
    "logprob gap": ("logprob_gap", ".0e"),
}


def table(workloads: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Format a Markdown table per workload, a row per variant."""
    sections = []
    titles = ["variant", *_COLUMNS, "reward, first 5 steps to last 10"]
    for workload, variants in workloads.items():
        rows = []
        for name, summary in variants.items():
            cells = [_text(summary.get(key), spec) for key, spec in _COLUMNS.values()]
            pairs = zip(summary["first_reward"], summary["last_reward"], strict=True)
            rewards = "; ".join(f"{a:.3f} to {b:.3f}" for a, b in pairs)
            rows.append([name, *cells, rewards or "-"])
        sections.append(f"### {workload}\n\n{markdown_table(titles, rows)}")
    return "\n".join(sections)


def _text(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def plot(workloads: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """Draw per workload the parts of a step, and rewards against seconds of steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.6 * len(workloads)), dpi=110)
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(workloads), 2, squeeze=False)
    for (bars, curves), (workload, variants) in zip(
        panels, workloads.items(), strict=True
    ):
        names = list(variants)
        left = [0.0] * len(names)
        for part in PARTS:
            widths = [variants[name][f"{part}_seconds"] or 0.0 for name in names]
            bars.barh(names, widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        bars.invert_yaxis()
        bars.set(xlabel="seconds per step (medians)", title=workload)
        bars.legend(frameon=False, fontsize=8)
        for number, (name, summary) in enumerate(variants.items()):
            for raw in summary["raw"]:
                seconds, now = [], 0.0
                for record in raw["records"]:
                    now += record["step_seconds"]
                    seconds.append(now)
                rewards = [record["reward"] for record in raw["records"]]
                label = name if raw is summary["raw"][0] else None
                curves.plot(seconds, rewards, color=f"C{number}", label=label)
        curves.set(xlabel="seconds, without the start", ylabel="reward", title=workload)
        curves.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
