"""Measure memory and seconds of one long sequence without any branch; --plot draws.

    python scripts/bench_long.py --plot docs/long.png --json docs/benchmarks/long.json

A single trajectory shares nothing, but it is cut into blocks all the same, so that its
activations are those of a block and not of the whole sequence. All tokens carry loss.
Counts the bytes of live tensors at the peak of one gradient without the model and its
gradients; on a GPU, what the allocator held. Lengths that the JSON file has already,
and that are not asked for, stay in it.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench.measure import CLOCKS, peak_bytes
from bench.models import build_model
from bench.table import benchmark_parser, header, machine, markdown_table
from bench.variants import make_variant
from bench.workloads import Sizes, Work, star

VARIANTS = {
    "dense": "dense",
    "dense_ckpt": "dense, activation checkpointing",
    "dta@512/0": "areal_dta, retain_tokens=0",
}
PROMPT_TOKENS = 8


def parse_args(argv: Sequence[str] | None) -> Namespace:
    parser = benchmark_parser(__doc__)
    parser.set_defaults(model="2m")
    add = parser.add_argument
    add("--lengths", default="2048,4096,8192,16384,32768,65536", help="tokens")
    add("--max-dense", type=int, default=32768, help="tokens that dense fits in memory")
    add("--repeats", type=int, default=1, help="timed runs, of which the median")
    add("--max-repeated", type=int, default=16384, help="longer ones: one run for both")
    add("--clock", choices=CLOCKS, default="cpu")
    add("--plot", type=Path, metavar="PNG")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(args.model, torch.float32, device, args.seed)
    vocab_size = model.config.vocab_size
    clock = CLOCKS[args.clock]
    where = machine(device)
    what = {"model": args.model, "clock": args.clock, "seed": args.seed}
    lengths = [int(length) for length in args.lengths.split(",")]
    points: list[dict[str, Any]] = []
    if args.json is not None and args.json.exists():
        found = json.loads(args.json.read_text())["points"]
        points = [point for point in found if point["tokens"] not in lengths]
    for length in lengths:
        sizes = Sizes(vocab_size, args.seed, prompt_tokens=PROMPT_TOKENS)
        workload = star(f"{length} tokens", 1, length - PROMPT_TOKENS, sizes)
        work = Work.of(workload, device, args.seed)
        for name in VARIANTS:
            if name.startswith("dense") and length > args.max_dense:
                continue
            run = partial(make_variant(name, model, {}).run, work)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            start = clock()
            peak = peak_bytes(run, model)
            seconds = [clock() - start]
            if length <= args.max_repeated:  # counting slows small blocks down
                seconds = [timed(run, clock, device) for _ in range(args.repeats)]
            point = {"variant": name, "tokens": length, "peak_bytes": peak}
            points.append({**point, "seconds": median(seconds)})
            print(points[-1], flush=True)
        if args.json is not None:  # so that a run that is stopped leaves what it has
            content = {"machine": where, "run": what, "points": points}
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(header("One long sequence", where, what))
    print(table(points))
    if args.plot is not None:
        plot(points, args.plot)


def timed(
    run: Callable[[], object], clock: Callable[[], float], device: torch.device
) -> float:
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def table(points: Sequence[dict[str, Any]]) -> str:
    """Format the points as Markdown: a row per length."""
    found = {(p["tokens"], p["variant"]): p for p in points}
    rows = []
    for length in sorted({p["tokens"] for p in points}):
        of_length = [found.get((length, name)) for name in VARIANTS]
        peaks = [f"{p['peak_bytes'] / 2**20:,.0f}" if p else "–" for p in of_length]
        seconds = [f"{p['seconds']:,.1f}" if p else "–" for p in of_length]
        rows.append([f"{length:,}", *peaks, *seconds])
    titles = [
        f"{label}, {unit}" for unit in ("MiB", "s") for label in VARIANTS.values()
    ]
    return markdown_table(["tokens", *titles], rows)


def plot(points: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    memory, time = figure.subplots(1, 2)
    for name, label in VARIANTS.items():
        of_variant = [p for p in points if p["variant"] == name]
        of_variant.sort(key=lambda p: p["tokens"])
        lengths = [p["tokens"] for p in of_variant]
        peaks = [p["peak_bytes"] / 2**20 for p in of_variant]
        memory.plot(lengths, peaks, marker="o", label=label)
        time.plot(lengths, [p["seconds"] for p in of_variant], marker="o", label=label)
    lengths = sorted({p["tokens"] for p in points})
    for axes, what in ((memory, "peak memory, MiB"), (time, "seconds")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
        axes.set(xlabel="tokens of the sequence", ylabel=what)
        axes.grid(alpha=0.3)
    memory.legend(fontsize=8)
    figure.suptitle("One sequence, no branches: loss and gradients")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
