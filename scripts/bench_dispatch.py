"""Plans of sequences on data-parallel ranks: simulated on many, measured on a few.

    python scripts/bench_dispatch.py                       # minutes, two cores
    python scripts/bench_dispatch.py --real-ranks none --sequences 1000000 \
        --ranks 1,8,64,256,1024 --json out.json

The cost model is fitted on the blocks of a real run on this machine, unless
`--real-ranks none`; then FLOPs are its only guide. It prices plans for tau2-shaped and
GSM8K-shaped batches (`--sequences` of them) on 1 to 1,024 ranks. With 1, 2 and 4 gloo
ranks on this machine, predicted seconds are compared with measured ones.

tau2 batches are replayed from recorded episodes where those and tau2 are at hand, and
generated with the same shape elsewhere (`--data none`).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.dispatch_batches import Batch, batch_of, gsm8k, replicated, tau2_workload
from bench.dispatch_ranks import RankJob, RankResult, run_ranks
from bench.dispatch_table import (
    LEGEND,
    Measured,
    Simulated,
    measured_table,
    simulated_table,
)
from bench.models import SHAPES, build_model
from bench.replayed import replay, why_not_replayed
from bench.table import benchmark_parser, header, machine
from bench.workloads import Sizes, Workload

from areal_dta.balance import CostModel, Plan, Pricing, partition
from areal_dta.schedule import FlopModel, NeededOutputs, build_schedule
from areal_dta.schedule.block_features import samples_from_array
from areal_dta.tree import PrefixTree

TAU2 = "tau2-airline"
FIELD = ("tokens", "tree_tokens")


def parse_args(argv: Sequence[str] | None) -> Namespace:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--ranks", default="1,2,4,8,16,64,256,1024", help="simulated; comma separated")
    add("--sequences", default="500,100000", help="of a simulated batch")
    add("--real-ranks", default="1,2,4", help="on this machine, or none")
    add("--path-tokens", type=int, default=1000, help="of the real batch, about")
    add("--real-sequences", type=int, default=64)
    add("--repeats", type=int, default=3, help="of each real plan")
    add("--block-tokens", type=int, default=512)
    add("--data", choices=("auto", "none"), default="auto")
    add("--timeout", type=float, default=600.0, help="seconds for one set of ranks")
    return parser.parse_args(argv)


class Dispatch:
    """The benchmark; its cost model gets better from what real ranks measure."""

    def __init__(self, args: Namespace, replayed: Path | None) -> None:
        self.args, self._replayed = args, replayed
        config = build_model(args.model, torch.float32, torch.device("meta"), 0).config
        self._flops = FlopModel.from_config(config)
        self.cost = CostModel.from_flops(self._flops)

    def sizes(self, max_sequences: int, path_tokens: int | None) -> Sizes:
        vocab_size = int(SHAPES[self.args.model]["vocab_size"])
        return Sizes(vocab_size, self.args.seed, path_tokens, max_sequences)

    def pricing(self) -> Pricing:
        return Pricing.from_cost_model(self.cost, self.args.block_tokens)

    # ---- measured

    def real(self, rank_counts: Sequence[int]) -> list[Measured]:
        args = self.args
        sizes = self.sizes(args.real_sequences, args.path_tokens)
        workload, groups = tau2_workload(TAU2, sizes, self._replayed)
        batch = batch_of(workload, groups)
        _say(f"real: {len(batch.order)} sequences, one rank to learn from")
        everything = self._plans(batch, 1)["tokens"].assignments
        job = RankJob(
            model=args.model,
            workload=workload,
            seed=args.seed,
            block_tokens=args.block_tokens,
            repeats=0,
            warm_up=everything,
            plans={},
            timeout_seconds=args.timeout,
        )
        (first,) = run_ranks(job, 1)
        self.cost.observe(np.array(first.samples))
        rows = []
        for num_ranks in rank_counts:
            _say(f"real: {num_ranks} ranks")
            plans = self._plans(batch, num_ranks)
            assignments = {name: plan.assignments for name, plan in plans.items()}
            job = replace(
                job,
                repeats=args.repeats,
                warm_up=assignments["tokens"],
                plans=assignments,
            )
            results = run_ranks(job, num_ranks)
            rows += self._compare(workload, plans, results)
        return rows

    def _plans(self, batch: Batch, num_ranks: int) -> dict[str, Plan]:
        def plan(methods: Sequence[str] | None, moves: bool) -> Plan:
            return partition(
                batch.order,
                num_ranks,
                self.pricing(),
                batch.num_outputs,
                batch.groups,
                methods,
                moves,
            )

        plans = {method: plan([method], False) for method in FIELD}
        return plans | {"ours": plan(None, True)}

    def _compare(
        self, workload: Workload, plans: dict[str, Plan], results: list[RankResult]
    ) -> list[Measured]:
        # These ranks' own blocks: they share the cores, so they are slower than one.
        cost = CostModel.from_flops(self._flops)
        cost.load_state_dict(self.cost.state_dict())
        cost.observe(np.array([row for result in results for row in result.samples]))
        rows = []
        for name, plan in plans.items():
            predicted = [self._predict(cost, workload, a) for a in plan.assignments]
            seconds = [result.seconds[name] for result in results]
            makespans = [max(of_repeat) for of_repeat in zip(*seconds, strict=True)]
            rows.append(
                Measured(
                    num_ranks=len(results),
                    method=name,
                    predicted_seconds=predicted,
                    measured_seconds=[statistics.median(s) for s in seconds],
                    makespan_seconds=statistics.median(makespans),
                    num_tree_tokens=plan.num_tree_tokens,
                    num_blocks_learned=sum(len(r.samples) for r in results),
                    block_error=cost.median_error(
                        samples_from_array(
                            np.array([b for r in results for b in r.blocks[name]])
                        )
                    ),
                    gradient_norm=results[0].checksum[name],
                )
            )
        return rows

    def _predict(
        self, cost: CostModel, workload: Workload, sequences: Sequence[int]
    ) -> float:
        share = workload.subset(sequences)
        tree = PrefixTree.from_sequences(share.sequences)
        needed = NeededOutputs.logprobs_at(
            tree, [mask[1:] for mask in share.loss_masks]
        )
        schedule = build_schedule(tree, self.args.block_tokens, needed=needed)
        return cost.schedule_seconds(tree, schedule)

    # ---- simulated

    def batches(self, num_sequences: int) -> list[Batch]:
        # planned, never run, so of any vocabulary
        sizes = Sizes(2**31, self.args.seed, None, min(num_sequences, 512))
        workload, groups = tau2_workload(TAU2, sizes, self._replayed)
        batch = batch_of(workload, groups)
        return [replicated(batch, num_sequences), gsm8k(num_sequences, self.args.seed)]

    def simulate(self, batch: Batch, num_ranks: int) -> Simulated:
        pricing = self.pricing()
        one = partition(
            batch.order, 1, pricing, batch.num_outputs, batch.groups, ["tokens"]
        )
        ideal = one.makespan_seconds / num_ranks
        plan = partition(
            batch.order, num_ranks, pricing, batch.num_outputs, batch.groups
        )
        over = {c.method: c.makespan_seconds / ideal for c in plan.candidates}
        least = batch.order.num_tree_tokens
        repeated = {c.method: c.num_tree_tokens - least for c in plan.candidates}
        return Simulated(
            batch=batch.name,
            num_sequences=len(batch.order),
            num_tree_tokens=least,
            num_ranks=num_ranks,
            over_ideal=over | {"ours": plan.makespan_seconds / ideal},
            repeated_tokens=repeated | {"ours": plan.num_repeated_tokens},
            imbalance=plan.imbalance,
            planning_seconds=plan.planning_seconds,
        )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    missing = why_not_replayed() if args.data == "auto" else "--data none"
    where = machine(torch.device("cpu"))
    what = {
        "model": f"{args.model} (random weights)",
        "tau2": "replayed" if missing is None else f"generated ({missing})",
        "block_tokens": args.block_tokens,
        "repeats": args.repeats,
        "seed": args.seed,
    }
    content: dict[str, Any] = {"machine": where, "run": what}
    print(header("Dispatch", where, what), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        replayed = None
        if missing is None:
            replayed = replay(TAU2, Path(scratch), "empty-think", 512, None)
        dispatch = Dispatch(args, replayed)
        if args.real_ranks != "none":
            measured = dispatch.real(_numbers(args.real_ranks))
            print("### Measured\n\n" + measured_table(measured), flush=True)
            content["measured"] = [asdict(row) for row in measured]
        simulated = []
        for num_sequences in _numbers(args.sequences):
            for batch in dispatch.batches(num_sequences):
                for num_ranks in _numbers(args.ranks):
                    _say(f"{batch.name}: {len(batch.order):,} on {num_ranks:,}")
                    simulated.append(dispatch.simulate(batch, num_ranks))
        print("### Simulated\n\n" + simulated_table(simulated))
        content["simulated"] = [asdict(row) for row in simulated]
    if args.json is not None:
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(LEGEND)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
