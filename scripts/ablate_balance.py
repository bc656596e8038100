"""What each stage of the search, and each term of the cost model, is worth.

    python -m recipes.tau2.replay --trajectories trajectories.jsonl --domain airline \
        --template empty-think --max-sequences 512 --out airline.npz
    python scripts/ablate_balance.py --data airline.npz --json balance-ablation.json

A variant replaces constants of `areal_dta/balance`, so that a row tells what a constant
does. Plans are compared on the shapes of the balance tests and on recorded episodes
(--data). Terms of the cost model are compared by the error of predicted seconds on
blocks that a small model ran on this CPU: in float32, then in float64, another speed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench.dispatch_batches import Batch, batch_of, conversations, tau2_workload
from bench.models import SHAPES, build_model
from bench.table import machine
from bench.work import Work
from bench.workloads import Sizes

from areal_dta.balance import (
    CostModel,
    Pricing,
    cost_model,
    local_search,
    packing,
    partition,
)
from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.schedule import BlockSample, FlopModel

TAU2 = "tau2-airline"
# (prompts, trajectories per prompt, calls per trajectory), numbers of ranks
GENERATED = (
    ((8, 8, 12), (8, 24)),
    ((32, 8, 12), (32, 64)),
    ((16, 4, 20), (32,)),
    ((16, 16, 4), (32,)),
)
RECORDED_RANKS = (8, 10, 12)
Replaced = dict[tuple[Any, str], Any]


def no_packings(*_: Any) -> Iterator[Any]:
    return iter(())


def stages() -> dict[str, Replaced]:
    """Replaced constants of each variant of the search."""
    # The package exports a function of the module's name, so look the module up.
    plan, moves = sys.modules[partition.__module__], local_search
    cuts_only = {(plan, "packings"): no_packings, (plan, "_SLACKS"): ()}
    return {
        "full": {},
        "cuts, packing and field, no local search": {(moves, "_MAX_SEQUENCES"): 0},
        "cuts and field, no packing, no local search": {
            **cuts_only,
            (moves, "_MAX_SEQUENCES"): 0,
        },
        "local search, no packing": {(plan, "packings"): no_packings},
        "local search from cuts alone, exact": cuts_only,
        "no looser cuts": {(plan, "_SLACKS"): ()},
        "no guard of hopeless starts": {(plan, "_HOPELESS"): math.inf},
        "packing: first limit only": {(packing, "_ROOM"): packing._ROOM[:1]},
        "packing: first 4 limits": {(packing, "_ROOM"): packing._ROOM[:4]},
        "packing: first 8 limits": {(packing, "_ROOM"): packing._ROOM[:8]},
        "packing: shared path ignored": {(packing, "_ALIKE"): 0.0},
        "packing: longest shared path": {(packing, "_ALIKE"): 1.0},
        "packing: 4 improved": {(plan, "_MAX_PACKED"): 4},
        "weights: 0.4 alone": {(plan, "WEIGHTS"): (0.4,)},
        "weights: 1, 0.1": {(plan, "WEIGHTS"): (1.0, 0.1)},
        "moves: at most 3 branches": {(moves, "_MAX_WIDTH_WIDE"): 3},
        "moves: narrow": {(moves, "_MAX_WIDE"): 0},
        "moves: 8 forks": {(moves, "_MAX_FORKS"): 8},
        "moves: 1 fork per run": {(moves, "_MIN_FORKS"): 1},
        "moves: 4 targets": {(moves, "_MAX_TARGETS"): 4},
        "moves: 16 priced": {(moves, "_MAX_PRICED"): 16},
        "moves: guesses not limited": {(moves, "_MAX_GUESS"): math.inf},
        "moves: any gain": {(moves, "_MIN_GAIN"): 1e-9},
        "pricings: 10,000 in all": {(plan, "_MAX_PRICINGS"): 10_000},
    }


def terms() -> dict[str, Replaced]:
    """Replaced constants of each variant of the cost model's fit."""
    return {
        "full": {},
        "no levels (runs of blocks at another speed)": {
            (cost_model, "_LEVEL_DEAD_ZONE"): math.inf
        },
        "levels without a dead zone": {(cost_model, "_LEVEL_DEAD_ZONE"): 0.0},
        "no forgetting (half-life)": {(cost_model, "_HALF_LIFE"): math.inf},
        "no outlier weights": {(cost_model, "_MIN_SPREAD"): 1e9},
        "no prior": {(cost_model, "_PRIOR_WEIGHT"): 1e-12},
        "one round of reweighting": {(cost_model, "_ROUNDS"): 1},
        "three rounds": {(cost_model, "_ROUNDS"): 3},
    }


@contextmanager
def replaced(constants: Replaced) -> Iterator[None]:
    with ExitStack() as stack:
        for (module, name), value in constants.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def batches(data: Path | None, seed: int) -> Iterator[tuple[Batch, Sequence[int]]]:
    for shape, ranks in GENERATED:
        order, groups, outputs = conversations(*shape, seed)
        name = "x".join(map(str, shape))
        yield Batch(name, "generated", order, outputs, groups), ranks
    if data is not None:
        workload, groups = tau2_workload(TAU2, Sizes(2**31, seed, None, 512), data)
        yield batch_of(workload, groups), RECORDED_RANKS


def search(data: Path | None, seed: int) -> list[dict[str, Any]]:
    pricing = Pricing.from_cost_model(CostModel.from_flops(FlopModel(4e7, 2e4, 1.6e7)))
    rows: list[dict[str, Any]] = []
    for name, constants in stages().items():
        makespans, totals, seconds = [], [], 0.0
        for batch, rank_counts in batches(data, seed):
            for num_ranks in rank_counts:
                start = time.process_time()
                with replaced(constants):
                    plan = partition(
                        batch.order, num_ranks, pricing, batch.num_outputs, batch.groups
                    )
                seconds += time.process_time() - start
                makespans.append(plan.makespan_seconds)
                totals.append(sum(plan.predicted_seconds))
        full = rows[0] if rows else {"makespans": makespans, "totals": totals}
        slower = np.array(makespans) / full["makespans"]
        dearer = np.array(totals) / full["totals"]
        rows.append(
            {
                "variant": name,
                "mean_makespan": float(slower.mean()),
                "max_makespan": float(slower.max()),
                "mean_total": float(dearer.mean()),
                "cpu_seconds": round(seconds, 2),
                "makespans": makespans,
                "totals": totals,
            }
        )
    return rows


def measured_blocks(seed: int, repeats: int) -> list[list[list[BlockSample]]]:
    """Blocks of each call, first in float32 and then in float64."""
    result = []
    for dtype in (torch.float32, torch.float64):
        model = build_model("tiny", dtype, torch.device("cpu"), seed)
        executor = TreeExecutor(model, ExecutorConfig(block_tokens=64))
        calls = []
        for i in range(repeats):
            sizes = Sizes(int(SHAPES["tiny"]["vocab_size"]), seed + i % 4, 600, 24)
            work = Work.of(tau2_workload(TAU2, sizes, None)[0], torch.device("cpu"), 0)
            executor.forward_backward(work.tree, work.loss, work.positions)
            calls.append(list(executor.last_samples))
        result.append(calls[1:])  # the first sets up kernels and memory
    return result


def fits(seed: int, repeats: int) -> list[dict[str, Any]]:
    before, after = measured_blocks(seed, repeats)
    half = len(before) // 2
    flops = FlopModel.from_config(
        build_model("tiny", torch.float32, torch.device("meta"), 0).config
    )
    rows = []
    for name, constants in terms().items():
        with replaced(constants):
            model = CostModel.from_flops(flops)
            for call in before[:half]:
                model.observe(call)
            same = model.median_error(s for call in before[half:] for s in call)
            for call in [*before[half:], *after[:2]]:
                model.observe(call)
            other = model.median_error(s for call in after[2:] for s in call)
        rows.append({"variant": name, "same_speed": same, "after_change": other})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help=".npz of recorded episodes")
    parser.add_argument("--repeats", type=int, default=13, help="calls per speed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    where = machine(torch.device("cpu"))
    print(f"{where}\nseed {args.seed}, repeats {args.repeats}, data {args.data}\n")
    errors = fits(args.seed, args.repeats)
    print("| cost model | same speed | after a change |\n|---|---:|---:|")
    for r in errors:
        same, other = r["same_speed"], r["after_change"]
        print(f"| {r['variant']} | {same:.1%} | {other:.1%} |", flush=True)
    plans = search(args.data, args.seed)
    print("\n| search | makespan, mean | worst | total, mean | CPU s |")
    print("|---|---:|---:|---:|---:|")
    for r in plans:
        print(
            f"| {r['variant']} | {r['mean_makespan']:.4f} | {r['max_makespan']:.4f} "
            f"| {r['mean_total']:.4f} | {r['cpu_seconds']:.1f} |"
        )
    if args.json is not None:
        content = {"machine": where, "seed": args.seed, "repeats": args.repeats}
        content |= {"cost_model": errors, "search": plans}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
