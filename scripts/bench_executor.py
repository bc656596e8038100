"""Compare the executor with other ways to compute the same gradient, in one process.

    python scripts/bench_executor.py                      # 20m, all workloads, minutes
    python scripts/bench_executor.py --model 20m --workloads tau2-airline \
        --path-tokens 6000 --variants dense,packed,dfs,dta,dta@2048/0 --json out.json

Prints Markdown: dense (one sequence at a time), dense with activation checkpointing,
strict prefixes merged, one packed block, node by node depth first, and this package,
each with seconds, peak memory and the error of its gradients. Needs torch,
transformers and numpy, not areal. `scripts/gpu_acceptance.sh` has the run for one GPU.
For a quick look: `--workloads grpo-short --variants dta --answer-tokens 64`.

tau2 workloads are replayed from recorded episodes (recipes/tau2/replay.py) if those and
tau2 are installed, and generated with the same shape otherwise; `--data` names a folder
that holds `<workload>.npz` already, or one such file, e.g. of a step that a run has
skipped (`skipped_steps/` in its directory).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench.measure import CLOCKS, Bench
from bench.models import SHAPES, build_model
from bench.replayed import DOMAINS, replay, why_not_replayed
from bench.table import (
    LEGEND,
    benchmark_parser,
    header,
    machine,
    workload_report,
    workload_section,
)
from bench.variants import VARIANTS, make_variant, parse_budgets
from bench.workloads import (
    TEMPLATES,
    WORKLOADS,
    Sizes,
    Work,
    Workload,
    load,
    make_workloads,
)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--workloads", default=",".join(WORKLOADS), help="comma separated")
    add("--variants", default=",".join(VARIANTS), help="also dta@BLOCK/RETAIN")
    add("--baseline", choices=("dense", "dense_packed"), default="dense")
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--threads", type=int, default=1, help="of the CPU")

    time_group = parser.add_argument_group("how long")
    add = time_group.add_argument
    add("--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine")
    add("--repeats", type=int, default=3, help="timed rounds")
    add("--max-seconds", type=float, help="a workload: start no round that ends later")
    add("--dense-sample", type=int, metavar="K", help="whole sequences: K, scaled")

    size_group = parser.add_argument_group("how large")
    add = size_group.add_argument
    add("--path-tokens", type=int, help="longest sequence, about; tree keeps its shape")
    add("--max-sequences", type=int, default=16, help="the first ones of a workload")
    add("--max-tokens", type=int, help="of all sequences; drops whole ones")
    add("--template", choices=TEMPLATES, default="empty-think", help="of tau2")
    add("--prompt-tokens", type=int, default=128, help="of grpo-short")
    add("--answer-tokens", default="16,64,256,1024", help="of grpo-short, each")
    add("--data", default="auto", help="auto, none, a folder of .npz, or one .npz")

    budget_group = parser.add_argument_group("budgets of dta")
    add = budget_group.add_argument
    add("--block-tokens", default="auto", help="a number or auto")
    add("--retain-tokens", default="auto", help="a number, all or auto")
    return parser.parse_args(argv)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def variant_names(text: str, baseline: str = "dense") -> list[str]:
    """Return the names, baseline first: everything is compared with it."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    return [baseline, *(name for name in names if name != baseline)]


def collect_workloads(args: argparse.Namespace, sizes: Sizes) -> list[Workload]:
    answers = [int(n) for n in args.answer_tokens.split(",")]
    missing = why_not_replayed() if args.data == "auto" else None
    workloads: list[Workload] = []
    if (file := Path(args.data)).suffix == ".npz":
        return [load(file.stem, file, sizes)]
    with tempfile.TemporaryDirectory() as scratch:
        for name in (name.strip() for name in args.workloads.split(",")):
            folder = None if args.data in ("auto", "none") else Path(args.data)
            if args.data == "auto" and name in DOMAINS:
                if missing is None:
                    folder = Path(scratch)
                    limits = args.max_sequences, args.max_tokens
                    replay(name, folder, args.template, *limits)
                else:
                    print(f"{name} is generated: {missing}", file=sys.stderr)
            workloads += make_workloads(name, sizes, answers, folder)
    return workloads


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    start = time.perf_counter()
    torch.set_num_threads(args.threads)
    device, dtype = pick_device(args.device), DTYPES[args.dtype]
    if args.clock == "cpu" and device.type != "cpu":
        raise SystemExit("--clock cpu measures nothing of a GPU; use --clock wall")
    sizes = Sizes(
        vocab_size=SHAPES[args.model]["vocab_size"],
        seed=args.seed,
        path_tokens=args.path_tokens,
        max_sequences=args.max_sequences,
        max_tokens=args.max_tokens,
        template=args.template,
        prompt_tokens=args.prompt_tokens,
    )
    workloads = collect_workloads(args, sizes)
    model = build_model(args.model, dtype, device, args.seed)
    budgets = parse_budgets(args.block_tokens, args.retain_tokens)
    names = variant_names(args.variants, args.baseline)
    variants = [make_variant(name, model, budgets) for name in names]
    bench = Bench(model, variants, CLOCKS[args.clock])

    where = machine(device)
    what = {
        "model": f"{args.model} ({model.num_parameters() / 1e6:.1f} M, random weights)",
        "dtype": args.dtype,
        "seed": args.seed,
        "rounds": args.repeats,
        "baseline": args.baseline,
        "clock": args.clock,
        "block_tokens": args.block_tokens,
        "retain_tokens": args.retain_tokens,
    }
    print(header("Executor", where, what), flush=True)
    reports: list[dict[str, Any]] = []
    for workload in workloads:
        work = Work.of(workload, device, args.seed)
        say = partial(_say, workload.name, start)
        measurements = bench.measure(
            work, args.repeats, args.dense_sample, args.max_seconds, say
        )
        reports.append(workload_report(work, measurements))
        print(workload_section(reports[-1]), flush=True)
        if args.json is not None:  # after each, so that a run cut short leaves some
            content = {"machine": where, "run": what, "workloads": reports}
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(LEGEND)


def _say(workload: str, start: float, text: str) -> None:
    seconds = time.perf_counter() - start
    print(f"[{seconds:6.1f} s] {workload}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
