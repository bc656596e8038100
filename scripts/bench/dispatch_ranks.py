"""Real ranks on this machine: each runs its share of a batch through the executor."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

from areal_dta.areal_fixes.loopback import LOOPBACK_ENV
from areal_dta.executor import ExecutorConfig, TreeExecutor
from bench.models import build_model
from bench.workloads import Work, Workload

WARM_UP_RUNS = 3  # that the cost model learns from
Assignments = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RankJob:
    """What all ranks are told."""

    model: str
    workload: Workload
    seed: int
    block_tokens: int
    repeats: int
    warm_up: Assignments
    """Run first, to learn from."""
    plans: dict[str, Assignments]
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class RankResult:
    samples: list[list[float]]
    """Blocks of the warm-up, as ``BlockSample.to_floats`` has them."""
    blocks: dict[str, list[list[float]]]
    """Those of the plans, of all repeats."""
    seconds: dict[str, list[float]]
    """Seconds of each plan, each repeat."""
    checksum: dict[str, float]
    """Norm of the gradient summed over the ranks, of each plan."""


def run_ranks(job: RankJob, num_ranks: int) -> list[RankResult]:
    """Run ``job`` on gloo ranks over loopback; none is left behind.

    Raises:
        RuntimeError: a rank failed, or they took longer than the time-out.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = spawn(_rank, (job, num_ranks, folder), num_ranks, join=False)
        deadline = time.monotonic() + job.timeout_seconds
        try:
            while not ranks.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{num_ranks} ranks took more than {job.timeout_seconds:.0f} s;"
                        " make the work smaller or raise --timeout"
                    )
        except ProcessException as error:
            raise RuntimeError(f"rank {error.error_index} failed: {error}") from error
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        contents = [
            json.loads((Path(folder) / f"{rank}.json").read_text())
            for rank in range(num_ranks)
        ]
    return [RankResult(**content) for content in contents]


def _rank(rank: int, job: RankJob, num_ranks: int, folder: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # gloo reports on stdout, where the tables go
    os.environ.update(LOOPBACK_ENV)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=job.timeout_seconds),
    )
    try:
        result = _measure(job, rank)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(asdict(result)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """A rank whose parent was killed must not wait for the others."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _measure(job: RankJob, rank: int) -> RankResult:
    model = build_model(job.model, torch.float32, torch.device("cpu"), job.seed)
    executor = TreeExecutor(model, ExecutorConfig(block_tokens=job.block_tokens))
    whole = Work.of(job.workload, torch.device("cpu"), job.seed)

    def run(indices: Sequence[int]) -> float:
        work = whole.subset(indices)
        # the loss is over the loss tokens of the batch, not of this rank's share
        share = work.workload.num_loss_tokens / max(1, whole.workload.num_loss_tokens)

        def loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
            return work.loss(index, logprobs, entropy) * share

        model.zero_grad(set_to_none=True)
        dist.barrier()
        start = time.perf_counter()
        executor.forward_backward(work.tree, loss, work.positions)
        return time.perf_counter() - start

    run(job.warm_up[rank])  # kernels and memory are set up; not learned from
    samples: list[list[float]] = []
    for _ in range(WARM_UP_RUNS):
        run(job.warm_up[rank])
        samples += (list(s.to_floats()) for s in executor.last_samples)
    blocks: dict[str, list[list[float]]] = {name: [] for name in job.plans}
    seconds: dict[str, list[float]] = {name: [] for name in job.plans}
    checksum: dict[str, float] = {}
    for _ in range(job.repeats):
        for name, assignments in job.plans.items():
            seconds[name].append(run(assignments[rank]))
            if assignments[rank]:
                blocks[name] += (list(s.to_floats()) for s in executor.last_samples)
            checksum[name] = _checksum(model)
    return RankResult(samples, blocks, seconds, checksum)


def _checksum(model: Any) -> float:
    """Norm of the gradient of the batch: every plan has the same."""
    total = 0.0
    for parameter in model.parameters():
        grad = parameter.grad
        grad = torch.zeros_like(parameter) if grad is None else grad.clone()
        dist.all_reduce(grad)
        total += float(grad.double().square().sum())
    return total**0.5
