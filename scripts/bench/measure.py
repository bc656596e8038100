"""Measures variants on one workload: gradients and memory first, untimed, then seconds.

Every round times all variants, so that a machine that drifts affects all alike.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.variants import RunCounts, Variant
from bench.workloads import Work

# "cpu" excludes other processes on a busy machine, and adds up threads.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class LiveBytes(TorchDispatchMode):
    """Context manager that counts the bytes of storages that operators make.

    A storage counts as long as anything (a tensor, a view, an autograd graph) keeps it
    alive. Scratch memory inside kernels is not seen. Unlike the resident set size, the
    count does not depend on the allocator.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        """``existing`` tensors are not counted, even if operators return them."""
        super().__init__()
        self._ignored = {t.untyped_storage()._cdata for t in existing}
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._upper = 0  # bound of `live`: dead storages are swept only at a new peak
        self.peak = 0

    @property
    def live(self) -> int:
        self._sweep()
        return self._upper

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        return out

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of a tensor from now on, as long as it is alive."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # not reused while a weak reference is held
        if key in self._held or key in self._ignored:
            return
        self._held[key] = (StorageWeakRef(storage), storage.nbytes())
        self._upper += storage.nbytes()
        if self._upper > self.peak:
            self._sweep()
            self.peak = max(self.peak, self._upper)

    def _sweep(self) -> None:
        for key, (reference, num_bytes) in list(self._held.items()):
            if reference.expired():
                del self._held[key]
                self._upper -= num_bytes


def peak_bytes(run: Callable[[], object], model: torch.nn.Module) -> int:
    """Return the peak bytes of ``run``: live tensors on a CPU, the allocator's on CUDA.

    Includes activations, K/V, logits, masks and temporaries. The model is left out, and
    so are its gradients, which must exist already.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    existing = [*model.parameters(), *model.buffers()]
    existing += [p.grad for p in model.parameters() if p.grad is not None]
    with LiveBytes(existing) as counter:
        run()
    return counter.peak


@dataclass(slots=True)
class Measurement:
    """Measurement of one variant on one workload."""

    variant: str
    bound: float
    """FLOPs of dense / minimum FLOPs of all that this variant computes."""
    seconds: list[float] = field(default_factory=list)
    """Seconds per round; extrapolated if ``sample`` is set."""
    ratios: list[float] = field(default_factory=list)
    """Seconds of dense / seconds, per round."""
    sample: int | None = None
    """Number of sequences that were measured, then scaled by FLOPs; None: all."""
    peak_bytes: int | None = None
    gradient_error: float | None = None
    """Norm of the difference to dense / norm of dense, over all parameters."""
    num_blocks: int | None = None
    num_tokens: int | None = None
    failure: str | None = None

    @property
    def median_seconds(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def efficiency(self) -> float | None:
        return None if self.ratio is None else self.ratio / self.bound


class Bench:
    """Runs variants of one model. The first one, dense, is the baseline."""

    def __init__(
        self,
        model: Any,
        variants: Sequence[Variant],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``clock`` times the runs, see CLOCKS."""
        self.model, self.variants, self._clock = model, list(variants), clock
        self._device = next(model.parameters()).device

    def measure(
        self,
        work: Work,
        repeats: int,
        dense_sample: int | None = None,
        max_seconds: float | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> list[Measurement]:
        """Return one measurement per variant.

        Args:
            repeats: timed rounds.
            dense_sample: number of sequences on which to measure variants that run
                whole sequences, and to check gradients.
            max_seconds: start no round that would end later.
            say: called with the progress.
        """
        start = time.perf_counter()
        dense_flops = self.variants[0].min_flops(work)
        results, works = [], []
        for variant in self.variants:
            results.append(
                Measurement(variant.name, dense_flops / variant.min_flops(work))
            )
            works.append(
                work if dense_sample is None else variant.sample(work, dense_sample)
            )
            if works[-1] is not work:
                results[-1].sample = works[-1].num_sequences
        self._inspect(works, results, say)
        for round_index in range(repeats):
            round_start = time.perf_counter()
            gc.collect()
            say(f"round {round_index + 1} of {repeats}")
            self._round(round_index, work, works, results)
            now = time.perf_counter()
            if max_seconds and now - start + (now - round_start) > max_seconds:
                break
        return results

    def _inspect(
        self, works: list[Work], results: list[Measurement], say: Callable[[str], None]
    ) -> None:
        """Fill in counts, gradient errors and peak memory; this also warms up."""
        dense_grads: list[Tensor] | None = None
        for variant, work, result in zip(self.variants, works, results, strict=True):
            say(f"{variant.name}: gradients and memory")
            try:
                counts, result.peak_bytes = self._run_counted(variant, works[0])
                if variant is self.variants[0]:
                    dense_grads = [g.clone() for g in self._gradients()]
                if dense_grads is not None:
                    result.gradient_error = self._error(dense_grads)
                if work is not works[0]:
                    counts, result.peak_bytes = self._run_counted(variant, work)
                result.num_blocks = counts.num_blocks
                result.num_tokens = counts.num_tokens
            except torch.OutOfMemoryError:
                result.failure = "out of memory"
            self.model.zero_grad(set_to_none=True)
            if self._device.type == "cuda":  # its blocks must not harm later variants
                gc.collect()
                torch.cuda.empty_cache()

    def _run_counted(self, variant: Variant, work: Work) -> tuple[RunCounts, int]:
        """Return counts and peak bytes; the gradients stay in the model."""
        for parameter in self._parameters():  # there before, so not counted
            parameter.grad = torch.zeros_like(parameter)
        counts: list[RunCounts] = []
        peak = peak_bytes(lambda: counts.append(variant.run(work)), self.model)
        return counts[0], peak

    def _round(
        self,
        round_index: int,
        work: Work,
        works: list[Work],
        results: list[Measurement],
    ) -> None:
        order = [i for i, result in enumerate(results) if result.failure is None]
        first = round_index % max(1, len(order))
        for i in order[first:] + order[:first]:
            variant = self.variants[i]
            scale = 1.0
            if works[i] is not work:
                scale = variant.min_flops(work) / variant.min_flops(works[i])
            results[i].seconds.append(self._timed(variant, works[i]) * scale)
        if results[0].failure is None:
            for i in order:
                ratio = results[0].seconds[-1] / results[i].seconds[-1]
                results[i].ratios.append(ratio)

    def _timed(self, variant: Variant, work: Work) -> float:
        self.model.zero_grad(set_to_none=True)
        self._synchronize()
        start = self._clock()
        variant.run(work)
        self._synchronize()
        return self._clock() - start

    def _parameters(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _gradients(self) -> list[Tensor]:
        grads = [p.grad for p in self._parameters()]
        assert all(grad is not None for grad in grads)
        return cast(list[Tensor], grads)

    def _error(self, dense_grads: list[Tensor]) -> float:
        difference = norm = 0.0
        for grad, expected in zip(self._gradients(), dense_grads, strict=True):
            wanted = expected.double()
            difference += float((grad.double() - wanted).square().sum())
            norm += float(wanted.square().sum())
        return (difference / norm) ** 0.5 if norm else difference**0.5

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
