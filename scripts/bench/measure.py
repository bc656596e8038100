"""Measure variants on one workload: gradients and memory first, untimed, then the
seconds in rounds over all variants, so that a drifting machine hits all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from bench.memory import peak_bytes
from bench.variants import RunCounts, Variant
from bench.work import Work

# "cpu" leaves out what others take on a busy machine, and adds up threads.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(slots=True)
class Measurement:
    """Of one variant on one workload."""

    variant: str
    bound: float
    """FLOPs of dense over the least FLOPs for all that this variant computes."""
    seconds: list[float] = field(default_factory=list)
    """Of each round; extrapolated where ``sample`` is set."""
    ratios: list[float] = field(default_factory=list)
    """Seconds of dense over seconds, of each round."""
    sample: int | None = None
    """How many sequences were measured and scaled by FLOPs; None: all."""
    peak_bytes: int | None = None
    gradient_error: float | None = None
    """Norm of the difference to dense over the norm of dense, all parameters."""
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
    """Runs variants of one model. The first one is the dense reference."""

    def __init__(
        self,
        model: Any,
        variants: Sequence[Variant],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``clock`` gives the seconds that runs are timed in, see CLOCKS."""
        self.model, self.variants, self._clock = model, list(variants), clock
        assert self.variants[0].name == "dense"
        self._device = next(model.parameters()).device

    def measure(
        self,
        work: Work,
        repeats: int,
        dense_sample: int | None = None,
        max_seconds: float | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> list[Measurement]:
        """One measurement a variant.

        Args:
            repeats: timed rounds.
            dense_sample: measure variants that run whole sequences on this many of
                them, and check gradients on those.
            max_seconds: start no further round that would end later.
            say: told what is being done.
        """
        start = time.perf_counter()
        dense_flops = self.variants[0].least_flops(work)
        results, works = [], []
        for variant in self.variants:
            results.append(
                Measurement(variant.name, dense_flops / variant.least_flops(work))
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
        self,
        works: list[Work],
        results: list[Measurement],
        say: Callable[[str], None],
    ) -> None:
        """Counts, gradients against dense on its work, and peak memory; warms up."""
        reference: list[Tensor] | None = None
        for variant, work, result in zip(self.variants, works, results, strict=True):
            say(f"{variant.name}: gradients and memory")
            try:
                counts, result.peak_bytes = self._run_counted(variant, works[0])
                if variant is self.variants[0]:
                    reference = [g.clone() for g in self._gradients()]
                if reference is not None:
                    result.gradient_error = self._error(reference)
                if work is not works[0]:
                    counts, result.peak_bytes = self._run_counted(variant, work)
                result.num_blocks = counts.num_blocks
                result.num_tokens = counts.num_tokens
            except torch.OutOfMemoryError:
                result.failure = "out of memory"
            self._drop_gradients()
            self._empty_cache()  # later variants must not suffer from its blocks

    def _run_counted(self, variant: Variant, work: Work) -> tuple[RunCounts, int]:
        """Its gradients stay in the model. Returns its peak bytes, too."""
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
                scale = variant.least_flops(work) / variant.least_flops(works[i])
            results[i].seconds.append(self._timed(variant, works[i]) * scale)
        if results[0].failure is None:
            for i in order:
                ratio = results[0].seconds[-1] / results[i].seconds[-1]
                results[i].ratios.append(ratio)

    def _timed(self, variant: Variant, work: Work) -> float:
        self._drop_gradients()
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

    def _error(self, reference: list[Tensor]) -> float:
        difference = norm = 0.0
        for grad, expected in zip(self._gradients(), reference, strict=True):
            wanted = expected.double()
            difference += float((grad.double() - wanted).square().sum())
            norm += float(wanted.square().sum())
        return (difference / norm) ** 0.5 if norm else difference**0.5

    def _drop_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
