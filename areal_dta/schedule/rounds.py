"""One order of forwards and backwards for several ranks that must keep step.

Each rank has its own sequence of operations. Where the ranks communicate in each, all
have to do the same kind of operation in the same round; one that has no such operation
next takes part idly. The result is a common supersequence, found greedily: the rank
with most left to do is never made to wait, so the number of rounds stays near the
longest sequence where they are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_dta.schedule.schedule import Schedule, StepKind

FORWARD, BACKWARD = "F", "B"


@dataclass(frozen=True, slots=True)
class Round:
    kind: str
    """FORWARD or BACKWARD."""
    ranks: frozenset[int]
    """Those that do their next operation; the others idle."""


def operations(schedule: Schedule) -> str:
    """The forwards and backwards of a schedule, in order."""
    result = []
    for step in schedule.steps:
        if step.computes:
            result.append(FORWARD)
        if step.kind is StepKind.EXIT and schedule.training:
            result.append(BACKWARD)
    return "".join(result)


def merge_rounds(of_rank: Sequence[str]) -> list[Round]:
    """Rounds in which every rank gets its operations in its own order.

    Deterministic, so that every rank finds the same rounds by itself.
    """
    position = [0] * len(of_rank)
    rounds: list[Round] = []
    while True:
        wanting: dict[str, list[int]] = {}
        most: dict[str, int] = {}
        for rank, (own, at) in enumerate(zip(of_rank, position, strict=True)):
            if at < len(own):
                wanting.setdefault(own[at], []).append(rank)
                most[own[at]] = max(most.get(own[at], 0), len(own) - at)
        if not wanting:
            return rounds
        kind = max(wanting, key=lambda k: (most[k], len(wanting[k]), k))
        for rank in wanting[kind]:
            position[rank] += 1
        rounds.append(Round(kind, frozenset(wanting[kind])))
