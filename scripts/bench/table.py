"""The options that all benchmarks have, and reports as Markdown and as JSON data."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import areal_dta
from areal_dta.doctor.machine import processor_name
from bench.measure import Measurement
from bench.models import SHAPES
from bench.workloads import Work

LEGEND = """\
Seconds are for loss and gradients of the whole batch, tokens/s count sequence tokens,
and the ratio to dense is the median over the rounds of dense seconds / seconds. All
variants deliver logprobs with gradients and entropies as values. FLOP bound: FLOPs of
dense over those of computing once what the variant computes (dta: what the loss reads;
dense_lean: all tokens, logits where there is loss; the others: logits everywhere);
efficiency: ratio / bound. Peak memory leaves out the model and its gradients; on a CPU
it is the bytes of live tensors, counted. packed and areal attend through sdpa with a
dense mask. ~: measured on some sequences and scaled by FLOPs; its blocks, tokens run
and peak are those of the sample, longest included."""


def benchmark_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have.

    Args:
        doc: docstring of the script; its first line says what it does.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    add = parser.add_argument
    add("--model", choices=SHAPES, default="20m", help="shape; weights are random")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE")
    return parser


def workload_report(work: Work, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return plain data on one workload, with the derived numbers beside the raw."""
    num_tokens = work.tree.num_sequence_tokens

    def measured(m: Measurement) -> dict[str, Any]:
        seconds = m.median_seconds
        return {
            **asdict(m),
            "median_seconds": seconds,
            "tokens_per_second": num_tokens / seconds if seconds else None,
            "ratio": m.ratio,
            "efficiency": m.efficiency,
        }

    return {
        "name": work.workload.name,
        "source": work.workload.source,
        "num_sequences": work.num_sequences,
        "num_sequence_tokens": num_tokens,
        "num_tree_tokens": work.tree.num_tree_tokens,
        "num_nodes": len(work.tree.nodes),
        "num_loss_tokens": work.workload.num_loss_tokens,
        "longest_tokens": work.tree.max_depth,
        "measurements": [measured(m) for m in measurements],
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Return where this runs, and with which versions."""
    return {
        "processor": processor_name(),
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


def header(title: str, where: dict[str, Any], what: dict[str, Any]) -> str:
    """Format the header; ``what`` is shown as it is: model, dtype, seed, budgets."""
    versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items())
    device = "" if where["device"] == "cpu" else f"{where['device']}, "
    options = ", ".join(f"{name} {value}" for name, value in what.items())
    return (
        f"## {title} benchmark\n\n"
        f"- machine: {device}{where['processor']}, {where['cores']} cores, "
        f"{where['threads']} thread(s) used, load average {where['load_average']} "
        "at the start\n"
        f"- versions: {versions}\n"
        f"- {options}\n"
    )


def markdown_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)
) -> str:
    """Format a Markdown table; the columns ``left`` are aligned left, others right."""
    rule = ["---" if i in left else "---:" for i in range(len(titles))]
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(rule)}|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def workload_section(report: dict[str, Any]) -> str:
    """Format a headline with the counts of the workload, and its table."""
    sharing = report["num_sequence_tokens"] / max(1, report["num_tree_tokens"])
    loss_share = report["num_loss_tokens"] / max(1, report["num_sequence_tokens"])
    rows = [
        [cell(report, m) for cell in _COLUMNS.values()] for m in report["measurements"]
    ]
    return (
        f"### {report['name']}\n\n"
        f"{report['num_sequences']} sequences, "
        f"{report['num_sequence_tokens']:,} tokens, "
        f"{report['num_tree_tokens']:,} in the tree ({sharing:.2f}x shared, "
        f"{report['num_nodes']} nodes), longest {report['longest_tokens']:,}, "
        f"{loss_share:.2%} with loss; {report['source']}\n\n"
        + markdown_table(list(_COLUMNS), rows)
    )


def _seconds(report: dict[str, Any], m: dict[str, Any]) -> str:
    if m["failure"] is not None:
        return str(m["failure"])
    text = _number("median_seconds", ".3f")(report, m)
    if m["sample"] is None:
        return text
    return f"~{text} ({m['sample']} of {report['num_sequences']})"


def _memory(report: dict[str, Any], m: dict[str, Any]) -> str:
    peak = m["peak_bytes"]
    return "-" if peak is None else f"{peak / 2**20:,.1f} MiB"


Cell = Callable[[dict[str, Any], dict[str, Any]], str]


def _number(key: str, form: str) -> Cell:
    return lambda _, m: "-" if m[key] is None else format(m[key], form)


_COLUMNS: dict[str, Cell] = {
    "variant": lambda _, m: str(m["variant"]),
    "seconds": _seconds,
    "tokens/s": _number("tokens_per_second", ",.0f"),
    "ratio to dense": _number("ratio", ".2f"),
    "FLOP bound": _number("bound", ".2f"),
    "efficiency": _number("efficiency", ".2f"),
    "peak memory": _memory,
    "blocks": _number("num_blocks", ","),
    "tokens run": _number("num_tokens", ","),
    "gradient error": _number("gradient_error", ".1e"),
}
