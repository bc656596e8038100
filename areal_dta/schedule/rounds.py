"""Common order of forwards and backwards for ranks that must keep step.

Each rank has its own sequence of operations. Where the ranks communicate in every
operation, all must do the same kind in the same round; a rank whose next operation is
of the other kind takes part idly. The rounds are a common supersequence, found
greedily: the rank with the most operations left never waits, so that similar ranks need
hardly more rounds than the longest sequence (tests/schedule/test_rounds.py).
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
    """Ranks that do their next operation; the others idle."""


def operations(schedule: Schedule) -> str:
    """Return the forwards and backwards of a schedule, in order."""
    result = []
    for step in schedule.steps:
        if step.computes:
            result.append(FORWARD)
        if step.kind is StepKind.EXIT and schedule.training:
            result.append(BACKWARD)
    return "".join(result)


def merge_rounds(of_rank: Sequence[str]) -> list[Round]:
    """Merge the operations of all ranks, each in its own order, into rounds.

    Deterministic, so that every rank finds the same rounds by itself.
    """
    position = [0] * len(of_rank)
    rounds: list[Round] = []
    while True:
        wanting: dict[str, list[int]] = {}
        max_left: dict[str, int] = {}
        for rank, (own, at) in enumerate(zip(of_rank, position, strict=True)):
            if at < len(own):
                wanting.setdefault(own[at], []).append(rank)
                max_left[own[at]] = max(max_left.get(own[at], 0), len(own) - at)
        if not wanting:
            return rounds
        kind = max(wanting, key=lambda k: (max_left[k], len(wanting[k]), k))
        for rank in wanting[kind]:
            position[rank] += 1
        rounds.append(Round(kind, frozenset(wanting[kind])))
