"""What each stage of the search, and each term of the cost model, is worth.

    python scripts/ablate_balance.py --data airline.npz --json balance-ablation.json

A variant replaces constants or functions of `areal_dta/balance`. Plans are compared on
the shapes of the balance tests and on recorded episodes (--data). Terms of the cost
model are compared by the median error of predictions for blocks of a small model on
this CPU: at the speed of the blocks learned from; when their seconds have been tripled,
after two calls; and after two calls in float64.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench.dispatch_batches import Batch, batch_of, conversations, tau2_workload
from bench.models import SHAPES, build_model
from bench.table import machine
from bench.workloads import Sizes, Work

from areal_dta.balance import CostModel, Pricing, cost_model, local_search, packing
from areal_dta.balance.partition import partition
from areal_dta.executor import ExecutorConfig, TreeExecutor, telemetry
from areal_dta.schedule import BlockSample, FlopModel

TAU2 = "tau2-airline"
# (prompts, trajectories per prompt, calls per trajectory), numbers of ranks
GENERATED = {
    (8, 8, 12): (8, 24),
    (32, 8, 12): (32, 64),
    **{(16, 4, 20): (32,), (16, 16, 4): (32,), (75, 8, 12): (240,)},
}
RECORDED_RANKS = (8, 10, 12)
Replaced = dict[tuple[Any, str], Any]


def without_swaps(ranks: Any, slowest: int, targets: Any, weight: float) -> list[Any]:
    kept = dict(ranks._parts)
    ranks._parts.update((target, []) for target in targets.tolist())
    moves = list(_CANDIDATES(ranks, slowest, targets, weight))
    ranks._parts = kept
    return moves


_CANDIDATES = local_search._Ranks._candidates


def stages() -> dict[str, Replaced]:
    """Replaced constants of each variant of the search."""
    # The package exports a function of the module's name, so look the module up.
    plan, moves = sys.modules[partition.__module__], local_search
    no_single = moves._Part(None, 0.0, math.inf)
    return {name: {key: value} for name, key, value in (
        ("no local search", (moves, "_MAX_SEQUENCES"), 0),
        ("no packing", (plan, "packings"), lambda *_: iter(())),
        ("no contiguous cuts", (plan, "METHODS"), ("tree_tokens", "tokens")),
        ("no sequence tokens", (plan, "METHODS"), ("contiguous", "tree_tokens")),
        ("packing: 1 limit", (packing, "_ROOM"), packing._ROOM[:1]),
        ("moves: no swaps", (moves._Ranks, "_candidates"), without_swaps),
        ("moves: swaps alone", (moves, "_NOTHING"), no_single),
        ("moves: weight 0.4 alone", (plan, "WEIGHTS"), (0.4,)),
        ("moves: weights 4, 1, 0.4, 0.1", (plan, "WEIGHTS"), (4.0, 1.0, 0.4, 0.1)),
        ("moves: narrow", (moves, "_MAX_WIDE"), 0),
        ("moves: at most 3 branches", (moves, "_MAX_WIDTH_WIDE"), 3),
    )}  # fmt: skip


def terms() -> dict[str, Replaced]:
    """Replaced constants of each variant of the cost model's fit."""
    return {name: {(cost_model, key): value} for name, key, value in (
        ("no levels", "_LEVEL_DEAD_ZONE", math.inf),
        ("no runs", "_RUN_SAMPLES", math.inf),
        ("levels without a dead zone", "_LEVEL_DEAD_ZONE", 0.0),
        ("no outlier weights", "_MIN_SPREAD", 1e9),
        ("no prior", "_PRIOR_WEIGHT", 1e-12),
        ("one round", "_ROUNDS", 1),
    )}  # fmt: skip


def replaced(constants: Replaced) -> ExitStack:
    stack = ExitStack()
    for (module, name), value in constants.items():
        stack.enter_context(mock.patch.object(module, name, value))
    return stack


def batches(data: Path | None, seed: int) -> Iterator[tuple[Batch, Sequence[int]]]:
    for shape, ranks in GENERATED.items():
        order, groups, outputs = conversations(*shape, seed)
        yield Batch(str(shape), "generated", order, outputs, groups), ranks
    if data is not None:
        workload, groups = tau2_workload(TAU2, Sizes(2**31, seed, None, 512), data)
        yield batch_of(workload, groups), RECORDED_RANKS


def search(data: Path | None, seed: int) -> Iterator[dict[str, Any]]:
    pricing = Pricing.from_cost_model(CostModel.from_flops(FlopModel(4e7, 2e4, 1.6e7)))
    full, to_plan = None, list(batches(data, seed))
    for name, constants in {"full": {}, **stages()}.items():
        seconds = []
        start = time.process_time()
        for batch, rank_counts in to_plan:
            args = pricing, batch.num_outputs, batch.groups
            with replaced(constants):
                plans = [partition(batch.order, k, *args) for k in rank_counts]
            seconds += [(p.makespan_seconds, sum(p.predicted_seconds)) for p in plans]
        full = np.array(seconds) if full is None else full
        slower, dearer = (np.array(seconds) / full).T
        yield {
            "search": name,
            "median": round(float(np.median(slower)), 4),
            "worst": round(float(slower.max()), 4),
            "total": round(float(dearer.mean()), 4),
            "CPU s": round(time.process_time() - start, 1),
        }


def measured_blocks(seed: int, repeats: int) -> list[list[list[BlockSample]]]:
    """CPU times of the blocks of each call, first in float32 and then in float64."""
    clock = SimpleNamespace(perf_counter=time.process_time)
    result: list[list[list[BlockSample]]] = []
    for dtype in (torch.float32, torch.float64):
        model = build_model("tiny", dtype, torch.device("cpu"), seed)
        executor = TreeExecutor(model, ExecutorConfig(block_tokens=64))
        result.append([])
        for i in range(repeats):
            sizes = Sizes(int(SHAPES["tiny"]["vocab_size"]), seed + i % 4, 600, 24)
            work = Work.of(tau2_workload(TAU2, sizes, None)[0], torch.device("cpu"), 0)
            with mock.patch.object(telemetry, "time", clock):
                executor.forward_backward(work.tree, work.loss, work.positions)
            result[-1].append(list(executor.last_samples))
    return [calls[1:] for calls in result]  # the first sets up kernels and memory


def fits(seed: int, repeats: int) -> Iterator[dict[str, Any]]:
    before, after = measured_blocks(seed, repeats)
    third = len(before) // 3
    early, late = before[: 2 * third], before[2 * third :]
    slow = [[replace(s, seconds=3 * s.seconds) for s in call] for call in late]
    config = build_model("tiny", torch.float32, torch.device("meta"), 0).config

    def error(learned: list[list[BlockSample]], of: list[list[BlockSample]]) -> float:
        model = CostModel.from_flops(FlopModel.from_config(config))
        for call in learned:
            model.observe(call)
        return round(model.median_error(s for call in of for s in call), 4)

    for name, constants in {"full": {}, **terms()}.items():
        with replaced(constants):
            yield {
                "cost model": name,
                "same speed": error(early, late),
                "3 times slower": error([*early, *slow[:2]], slow[2:]),
                "float64": error([*before, *after[:2]], after[2:]),
            }


def printed(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    result = []
    for row in rows:
        if not result:
            print(f"\n| {' | '.join(row)} |\n|---{'|---:' * (len(row) - 1)}|")
        print(f"| {' | '.join(map(str, row.values()))} |", flush=True)
        result.append(row)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help=".npz of recorded episodes")
    parser.add_argument("--repeats", type=int, default=13, help="calls per dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    content = {"machine": machine(torch.device("cpu")), "seed": args.seed}
    content["cost_model"] = printed(fits(args.seed, args.repeats))
    content["search"] = printed(search(args.data, args.seed))
    if args.json is not None:
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
