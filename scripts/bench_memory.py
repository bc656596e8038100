"""Measure peak memory against the number of branches; --plot draws a picture.

    python scripts/bench_memory.py --plot docs/memory.png        # one core, minutes

One trunk with more and more branches of equal length: the tree grows, its longest path
does not. Counts the bytes of live tensors at the peak of one gradient (activations,
keys, values, logits, masks) without the model and its gradients; on a GPU, what the
allocator held.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench.measure import peak_bytes
from bench.models import SHAPES, build_model
from bench.table import header, machine
from bench.variants import make_variant
from bench.workloads import Work, Workload

VARIANTS = {
    "dense": "dense, one sequence at a time",
    "packed": "packed, one masked block",
    "dta@256/all": "dta, all graphs retained",
    "dta@256/0": "dta, retain_tokens=0",
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", choices=SHAPES, default="20m", help="shape; weights are random")
    add("--trunk-tokens", type=int, default=512)
    add("--branch-tokens", type=int, default=48)
    add("--branches", default="1,4,16,64,256", help="comma separated")
    add("--most-packed", type=int, default=64, help="branches; its mask is quadratic")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="PNG")
    return parser.parse_args(argv)


def star(num_branches: int, trunk: int, branch: int, vocab: int, seed: int) -> Workload:
    """Generate a trunk and its branches; the branches carry loss."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, trunk)
    sequences = []
    for i in range(num_branches):
        own = rng.integers(0, vocab, branch)
        own[0] = i
        sequences.append(np.concatenate([shared, own]))
    mask = np.arange(trunk + branch) >= trunk
    return Workload(
        f"{num_branches} branches",
        "generated",
        tuple(sequences),
        (mask,) * num_branches,
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(args.model, torch.float32, device, args.seed)
    vocab = SHAPES[args.model]["vocab_size"]
    branches = [int(n) for n in args.branches.split(",")]
    peaks: dict[str, list[int | None]] = {name: [] for name in VARIANTS}
    for num_branches in branches:
        workload = star(
            num_branches, args.trunk_tokens, args.branch_tokens, vocab, args.seed
        )
        work = Work.of(workload, device, args.seed)
        for name in VARIANTS:
            if name == "packed" and num_branches > args.most_packed:
                peaks[name].append(None)
                continue
            # Dense runs one sequence at a time, so its peak is that of one.
            sample = work.subset([0]) if name == "dense" else work
            variant = make_variant(name, model, {})
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            peaks[name].append(peak_bytes(partial(variant.run, sample), model))

    where = machine(device)
    what = {
        "model": args.model,
        "trunk": f"{args.trunk_tokens} tokens",
        "branches": f"{args.branch_tokens} tokens each",
        "seed": args.seed,
    }
    print(header(where, what))
    print(table(branches, peaks))
    if args.json is not None:
        content = {"machine": where, "run": what, "branches": branches, "peaks": peaks}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot is not None:
        plot(branches, peaks, args.plot)


def table(branches: Sequence[int], peaks: dict[str, list[int | None]]) -> str:
    """Format the peaks as Markdown, in MiB."""
    lines = [
        "| peak memory, MiB | "
        + " | ".join(f"{n} branch" + "es" * (n > 1) for n in branches)
        + " |",
        "|---|" + "---:|" * len(branches),
    ]
    for name, values in peaks.items():
        cells = ["–" if v is None else f"{v / 2**20:.1f}" for v in values]
        lines.append(f"| {VARIANTS[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(
    branches: Sequence[int], peaks: dict[str, list[int | None]], path: Path
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, values in peaks.items():
        shown = [(n, v / 2**20) for n, v in zip(branches, values, strict=True) if v]
        axes.plot(*zip(*shown, strict=True), marker="o", label=VARIANTS[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(branches, [str(n) for n in branches])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("branches of one trunk")
    axes.set_ylabel("peak memory, MiB")
    axes.set_title("Memory follows the path, not the number of branches")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
