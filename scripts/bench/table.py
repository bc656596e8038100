"""Reports measurements as Markdown and as plain data for JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import areal_dta
from bench.measure import Measurement
from bench.workloads import Work

LEGEND = """\
Seconds are for loss and gradients of the whole batch, tokens/s count sequence tokens,
and the ratio to dense is the median over the rounds of dense seconds / seconds. All
variants deliver logprobs with gradients and entropies as values. FLOP bound: FLOPs of
dense over those of computing once what the variant computes (dta: what the loss reads;
the others: logits at every position); efficiency: ratio / bound. Peak memory leaves out
the model and its gradients; on a CPU it is the bytes of live tensors, counted.
packed attends through sdpa with a dense mask. ~: measured on some sequences and scaled
by FLOPs; its blocks, tokens run and peak are those of the sample, longest included."""


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """Report on one workload: one table."""

    name: str
    source: str
    num_sequences: int
    num_sequence_tokens: int
    num_tree_tokens: int
    num_nodes: int
    num_loss_tokens: int
    longest_tokens: int
    measurements: tuple[Measurement, ...]

    @classmethod
    def of(cls, work: Work, measurements: Sequence[Measurement]) -> WorkloadReport:
        return cls(
            name=work.workload.name,
            source=work.workload.source,
            num_sequences=work.num_sequences,
            num_sequence_tokens=work.tree.num_sequence_tokens,
            num_tree_tokens=work.tree.num_tree_tokens,
            num_nodes=len(work.tree.nodes),
            num_loss_tokens=work.workload.num_loss_tokens,
            longest_tokens=work.tree.max_depth,
            measurements=tuple(measurements),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with the derived numbers beside the raw ones."""
        data = asdict(self)
        for entry, m in zip(data["measurements"], self.measurements, strict=True):
            entry["median_seconds"] = m.median_seconds
            entry["tokens_per_second"] = _tokens_per_second(self, m)
            entry["ratio"] = m.ratio
            entry["efficiency"] = m.efficiency
        return data


def machine(device: torch.device) -> dict[str, Any]:
    """Return where this runs, and with which versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else device.type,
        "versions": {
            "areal_dta": areal_dta.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def header(where: dict[str, Any], what: dict[str, Any]) -> str:
    """Format the header; ``what`` is shown as it is: model, dtype, seed, budgets."""
    versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items())
    device = "" if where["device"] == "cpu" else f"{where['device']}, "
    options = ", ".join(f"{name} {value}" for name, value in what.items())
    return (
        "## Executor benchmark\n\n"
        f"- machine: {device}{where['processor']}, {where['cores']} cores, "
        f"{where['threads']} thread(s) used, load average {where['load_average']} "
        "at the start\n"
        f"- versions: {versions}\n"
        f"- {options}\n"
    )


def workload_section(report: WorkloadReport) -> str:
    """Format a headline with the counts of the workload, and its table."""
    sharing = report.num_sequence_tokens / max(1, report.num_tree_tokens)
    loss_share = report.num_loss_tokens / max(1, report.num_sequence_tokens)
    lines = [
        f"### {report.name}",
        "",
        f"{report.num_sequences} sequences, {report.num_sequence_tokens:,} tokens, "
        f"{report.num_tree_tokens:,} in the tree ({sharing:.2f}x shared, "
        f"{report.num_nodes} nodes), longest {report.longest_tokens:,}, "
        f"{loss_share:.2%} with loss; {report.source}",
        "",
        "| " + " | ".join(title for title, _ in _COLUMNS) + " |",
        "|---" + "|---:" * (len(_COLUMNS) - 1) + "|",
    ]
    for m in report.measurements:
        cells = [cell(report, m) for _, cell in _COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _tokens_per_second(report: WorkloadReport, m: Measurement) -> float | None:
    seconds = m.median_seconds
    return report.num_sequence_tokens / seconds if seconds else None


def _seconds(report: WorkloadReport, m: Measurement) -> str:
    if m.failure is not None:
        return m.failure
    text = _number(m.median_seconds, ".3f")
    if m.sample is None:
        return text
    return f"~{text} ({m.sample} of {report.num_sequences})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _memory(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"


_COLUMNS: list[tuple[str, Callable[[WorkloadReport, Measurement], str]]] = [
    ("variant", lambda r, m: m.variant),
    ("seconds", _seconds),
    ("tokens/s", lambda r, m: _number(_tokens_per_second(r, m), ",.0f")),
    ("ratio to dense", lambda r, m: _number(m.ratio, ".2f")),
    ("FLOP bound", lambda r, m: _number(m.bound, ".2f")),
    ("efficiency", lambda r, m: _number(m.efficiency, ".2f")),
    ("peak memory", lambda r, m: _memory(m.peak_bytes)),
    ("blocks", lambda r, m: _number(m.num_blocks, ",")),
    ("tokens run", lambda r, m: _number(m.num_tokens, ",")),
    ("gradient error", lambda r, m: _number(m.gradient_error, ".1e")),
]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
