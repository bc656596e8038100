"""What one controller does per token, and how long a step waits for it.

    python scripts/bench_collector.py                      # a minute on one core
    python scripts/bench_collector.py --sequences 16384 --json out.json

Groups of `--group` sequences, of which an eighth is a common prompt, are encoded as
AReaL's workers send them, and taken in. *Beside the step* is the collector's work while
rollouts run: decoding, checks, insertion. *In the step* is what holds a step up: the
batch is taken out of the forest, measured, planned and dealt to `--ranks` ranks for
four calls. `dense row` is the same batch planned for engines without prefix sharing,
`no sharing` has no common prompt, and `from tensors` is how 0.1.0 measured a batch:
from ids and masks at hand. Seconds are CPU time of the one thread that does the work:
other processes of the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from areal.infra.rpc import rtensor
from areal.infra.rpc.rtensor import RTensor, TensorShardInfo
from areal.infra.rpc.serialization import deserialize_value, serialize_value
from bench.table import header, machine, markdown_table

from areal_dta.collector.collector import Collector
from areal_dta.collector.controllers import deal
from areal_dta.collector.planned_batch import PlannedBatch
from areal_dta.collector.planner import BatchPlanner
from areal_dta.collector.remote_tensors import FetchMeter, fetch, forget
from areal_dta.collector.validate_trajectory import FETCHED_KEYS
from areal_dta.report.batch_sharing import BatchMeter
from areal_dta.schedule import FlopModel

_FLOPS = FlopModel(per_token=2e9, per_pair=1e5, per_output=2e8)
_NUM_CALLS = 4  # values, reference, proximal logprobs, update
_VOCAB = 150_000


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--sequences", default="256,1024,4096", help="of a batch; comma separated")
    add("--tokens", type=int, default=8192, help="per sequence")
    add("--group", type=int, default=16, help="sequences per prompt")
    add("--ranks", type=int, default=8)
    add("--minibatches", type=int, default=4)
    add("--compared", type=int, default=1024, help="largest batch measured as by 0.1.0")
    add("--large", type=int, default=32768, help="tokens per sequence of a large group")
    add("--repeats", type=int, default=3, help="of what holds up a step; the median")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


@dataclass
class Row:
    """Seconds and bytes of one batch."""

    name: str
    num_sequences: int
    num_tokens: int
    fetched_bytes: int
    fetch_seconds: float
    check_seconds: float
    insert_seconds: float
    take_seconds: float
    meter_seconds: float
    plan_seconds: float
    dispatch_seconds: float
    dispatched_bytes: int
    from_tensors_seconds: float | None

    @property
    def hold_up_seconds(self) -> float:
        planning = self.plan_seconds + self.dispatch_seconds
        return self.take_seconds + self.meter_seconds + planning


class Wire:
    """Backend of remote tensors that holds them encoded, as they come over HTTP."""

    def __init__(self) -> None:
        self._encoded: dict[str, bytes] = {}

    def send(self, item: dict[str, torch.Tensor]) -> dict[str, RTensor]:
        sent = {}
        for key, tensor in item.items():
            shard = TensorShardInfo(f"{len(self._encoded):036d}", "10.0.0.1:20000")
            self._encoded[shard.shard_id] = orjson.dumps(serialize_value(tensor))
            sent[key] = RTensor(shard, tensor.to("meta"))
        return sent

    def fetch(self, shards: list[TensorShardInfo]) -> list[torch.Tensor]:
        encoded = (self._encoded[shard.shard_id] for shard in shards)
        return [deserialize_value(orjson.loads(data)) for data in encoded]

    def drop(self) -> None:
        self._encoded = dict.fromkeys(self._encoded, b"")


def make_group(rows: int, tokens: int, common: int, seed: int) -> dict[str, Any]:
    """Return a result as AReaL's workflows make them."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, _VOCAB, (rows, tokens), np.int32)
    ids[:, :common] = ids[0, :common]
    shape = (rows, tokens)
    loss_mask = torch.ones(shape, dtype=torch.int32)
    loss_mask[:, : tokens // 8] = 0
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.ones(shape, dtype=torch.bool),
        "loss_mask": loss_mask,
        "logprobs": torch.from_numpy(rng.random(shape, np.float32)),
        "versions": loss_mask - 1,
        "rewards": torch.from_numpy(rng.random(rows, np.float32)),
    }


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.wire = args, Wire()
        self.traffic = FetchMeter(60.0)
        self.traffic._backend = self.wire  # type: ignore[assignment]

    def row(self, name: str, num_sequences: int, share: bool, dense: bool) -> Row:
        args = self.args
        common = args.tokens // 8 if share else 0
        collector = Collector(vocab_size=_VOCAB)
        items: list[Any] = []
        at_hand: list[Any] = []
        is_compared = num_sequences <= args.compared
        # Beside the step: results arrive.
        for i in range(num_sequences // args.group):
            local = make_group(args.group, args.tokens, common, args.seed + i)
            item = self.wire.send(local)
            with collector.timed("fetch", time.thread_time):
                (fetched,) = fetch([item], FETCHED_KEYS)
            forget([item], FETCHED_KEYS)
            collector.offer(i, fetched, 0)
            self.wire.drop()
            items.append(item)
            if is_compared:
                at_hand.append(fetched)
        beside = collector.take_metrics(1.0)
        fetched_bytes = int(self.traffic.take_metrics()["collector/fetched_bytes"])
        # In the step
        started = time.thread_time()
        sequences = collector.take(range(len(items)))
        take_seconds = time.thread_time() - started
        assert sequences is not None
        batch = PlannedBatch(items, sequences)
        meter = BatchMeter(_FLOPS, 512, None)
        planner = BatchPlanner(_FLOPS, dense=dense)
        plan_seconds = self.median(
            lambda: planner.plan(sequences, args.ranks, args.minibatches)
        )
        plan = batch.plan(planner, args.ranks, args.minibatches)
        sent, shares, _ = deal(batch, plan)
        num_bytes = sum(map(len, shares))
        for address, shards in RTensor.collect_shards(sent).items():
            num_bytes += sum(len(shard) + len(address) for shard in shards)
        return Row(
            name,
            num_sequences,
            sequences.stats.num_sequence_tokens,
            fetched_bytes,
            beside["collector/fetch_seconds"],
            beside["collector/check_seconds"],
            beside["collector/insert_seconds"],
            take_seconds,
            self.median(lambda: meter.measure(batch)),
            plan_seconds,
            _NUM_CALLS * self.median(lambda: deal(batch, plan)),
            _NUM_CALLS * num_bytes,
            self.median(lambda: meter.measure(at_hand)) if is_compared else None,
        )

    def delay_beside_a_large_group(self, num_threads: int) -> tuple[float, float]:
        """Return the seconds of taking in a large group, and a small one behind it."""
        args = self.args
        collector = Collector()
        large = self.wire.send(make_group(args.group, args.large, 0, args.seed))
        small = self.wire.send(make_group(args.group, 256, 0, args.seed + 1))

        def take_in(task_id: int, item: Any) -> float:
            (fetched,) = fetch([item], FETCHED_KEYS)
            collector.offer(task_id, fetched, 0)
            forget([item], FETCHED_KEYS)
            return time.perf_counter()

        with ThreadPoolExecutor(num_threads) as threads:
            started = time.perf_counter()
            ends = [
                threads.submit(take_in, task_id, item)
                for task_id, item in enumerate((large, small))
            ]
            large_end, small_end = (end.result() for end in ends)
        self.wire.drop()
        return large_end - started, small_end - started

    def median(self, call: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(self.args.repeats):
            started = time.thread_time()
            call()
            seconds.append(time.thread_time() - started)
        return float(np.median(seconds))


def table(rows: Sequence[Row]) -> str:
    titles = ["batch", "sequences", "tokens, M", "fetched, B/token", "fetch s"]
    titles += ["check s", "insert s", "beside, ns/token", "take s", "meter s", "plan s"]
    titles += ["dispatch s", "dispatched, B/sequence", "**in the step, s**"]
    cells = []
    for r in rows:
        beside = r.fetch_seconds, r.check_seconds, r.insert_seconds
        step = r.take_seconds, r.meter_seconds, r.plan_seconds, r.dispatch_seconds
        cells.append([r.name, f"{r.num_sequences:,}", f"{r.num_tokens / 1e6:.1f}"])
        cells[-1] += [f"{r.fetched_bytes / r.num_tokens:.1f}"]
        cells[-1] += [f"{s:.2f}" for s in beside]
        cells[-1] += [f"{sum(beside) / r.num_tokens * 1e9:.0f}"]
        cells[-1] += [f"{s:.3f}" for s in step]
        cells[-1] += [f"{r.dispatched_bytes / r.num_sequences:.0f}"]
        old = r.from_tensors_seconds
        cells[-1] += [f"**{sum(step):.3f}**", "-" if old is None else f"{old:.2f}"]
    return markdown_table([*titles, "meter from tensors s"], cells)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(1)
    bench = Bench(args)
    rtensor.set_backend(bench.traffic)
    counts = [int(n) for n in args.sequences.split(",")]
    rows = [bench.row("shared prompt", n, True, False) for n in counts]
    rows.append(bench.row("dense row", counts[0], True, True))
    rows.append(bench.row("no sharing", counts[0], False, False))
    delays = {n: bench.delay_beside_a_large_group(n) for n in (1, 8)}
    where = machine(torch.device("cpu"))
    what = {k: v for k, v in vars(args).items() if k not in ("json", "sequences")}
    print(header("Collector", where, what))
    print(table(rows))
    for n, (large, small) in delays.items():
        print(
            f"- {n} threads: a group of {args.group} x {args.large:,} tokens is taken "
            f"in after {large:.2f} s, one of {args.group} x 256 behind it after "
            f"{small:.2f} s (wall clock)"
        )
    if args.json:
        data = {
            "machine": where,
            "options": what,
            "rows": [{**asdict(r), "hold_up_seconds": r.hold_up_seconds} for r in rows],
            "large_group": [
                {"threads": n, "large_seconds": large, "small_seconds": small}
                for n, (large, small) in delays.items()
            ],
        }
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
