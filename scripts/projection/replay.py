"""Seconds of a log on a card: the host launches ahead, the device follows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from projection.op_log import Segment
from projection.rates import Rates


@dataclass(slots=True)
class Totals:
    """Sums over operators, of a segment or of a run."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Device seconds per kind of kernel."""
    host: float = 0.0
    launches: float = 0.0
    num_bytes: float = 0.0
    flops: float = 0.0
    syncs: float = 0.0
    is_backward: bool = False

    @property
    def device(self) -> float:
        return sum(self.seconds.values())

    def plus(self, other: Totals, times: float = 1.0) -> Totals:
        """Return this and ``times`` the other."""
        seconds = Counter(self.seconds)
        for kind, value in other.seconds.items():
            seconds[kind] += value * times
        return Totals(
            dict(seconds),
            *(
                getattr(self, name) + times * getattr(other, name)
                for name in ("host", "launches", "num_bytes", "flops", "syncs")
            ),
            self.is_backward,
        )


def total(segment: Segment, rates: Rates) -> Totals:
    """Sum the operators of a segment."""
    found = Totals(is_backward=segment.is_backward)
    per_launch = (
        rates.host_backward_seconds
        if segment.is_backward
        else rates.host_forward_seconds
    )
    for op in segment.ops:
        found.seconds[op.kind] += rates.seconds(op)
        found.host += per_launch * op.launches
        found.launches += op.launches
        found.num_bytes += op.num_bytes
        found.flops += op.flops
        found.syncs += op.syncs
    return found


def extrapolated(
    few: Sequence[Segment], more: Sequence[Segment], layers: tuple[int, int, int], rates
) -> list[Totals]:
    """Return the segments of a model with more layers, which are all alike.

    Args:
        few, more: logs of the same work on models of ``layers[0]`` and ``layers[1]``
            layers; ``layers[2]`` are wanted. The first and last layer may differ from
            the rest.
    """
    assert len(few) == len(more), "the passes are those of the schedule, whatever model"
    times = (layers[2] - layers[0]) / (layers[1] - layers[0])
    result = []
    for a, b in zip(few, more, strict=True):
        assert a.is_backward == b.is_backward
        small, large = total(a, rates), total(b, rates)
        result.append(small.plus(large.plus(small, -1.0), times))
    return result


def wall_seconds(segments: Sequence[Totals], rates: Rates) -> float:
    """Return the seconds until the device is done.

    The host runs ahead of the device, except where it waits for it; the device cannot
    end a segment before the host has launched it.
    """
    host = device = 0.0
    for segment in segments:
        start = host
        host += segment.host
        device = max(max(device, start) + segment.device, host)
        if segment.syncs:
            host = device = max(host, device) + rates.sync_seconds * segment.syncs
    return device
