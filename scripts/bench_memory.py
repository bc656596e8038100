"""Measure peak memory against the number of branches; --plot draws a picture.

    python scripts/bench_memory.py --plot docs/memory.png        # one core, minutes

One trunk with more and more branches of equal length: the tree grows, its longest path
does not. Counts the bytes of live tensors at the peak of one gradient (activations,
keys, values, logits, masks) without the model and its gradients; on a GPU, what the
allocator held.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from bench.measure import peak_bytes
from bench.models import SHAPES, build_model
from bench.table import benchmark_parser, header, machine, markdown_table
from bench.variants import make_variant
from bench.workloads import Sizes, Work, star

VARIANTS = {
    "dense": "dense, one sequence at a time",
    "packed": "packed, one masked block",
    "dta@256/all": "dta, all graphs retained",
    "dta@256/0": "dta, retain_tokens=0",
}


def parse_args(argv: Sequence[str] | None) -> Namespace:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--trunk-tokens", type=int, default=512)
    add("--branch-tokens", type=int, default=48)
    add("--branches", default="1,4,16,64,256", help="comma separated")
    add("--most-packed", type=int, default=64, help="branches; its mask is quadratic")
    add("--plot", type=Path, metavar="PNG")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(args.model, torch.float32, device, args.seed)
    vocab_size = SHAPES[args.model]["vocab_size"]
    sizes = Sizes(vocab_size, args.seed, prompt_tokens=args.trunk_tokens)
    branches = [int(n) for n in args.branches.split(",")]
    peaks: dict[str, list[int | None]] = {name: [] for name in VARIANTS}
    for num_branches in branches:
        workload = star(
            f"{num_branches} branches", num_branches, args.branch_tokens, sizes
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
    print(header("Memory", where, what))
    print(table(branches, peaks))
    if args.json is not None:
        content = {"machine": where, "run": what, "branches": branches, "peaks": peaks}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot is not None:
        plot(branches, peaks, args.plot)


def table(branches: Sequence[int], peaks: dict[str, list[int | None]]) -> str:
    """Format the peaks as Markdown, in MiB."""
    titles = [f"{n} branch" + "es" * (n > 1) for n in branches]
    rows = [
        [VARIANTS[name], *("–" if v is None else f"{v / 2**20:.1f}" for v in values)]
        for name, values in peaks.items()
    ]
    return markdown_table(["peak memory, MiB", *titles], rows)


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
