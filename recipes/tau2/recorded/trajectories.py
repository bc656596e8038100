"""Reads recorded episodes: one JSON object per line."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_dta.tasks.jsonl import read_jsonl
from recipes.tau2.domains import find_domain

_FIELDS: dict[str, tuple[type, ...]] = {
    "domain": (str,),
    "task_id": (str,),
    "trial": (int,),
    "reward": (int, float),
    "messages": (list,),
}
_EXPECTED = f"expected one JSON object per line with {', '.join(_FIELDS)}"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One recorded episode."""

    episode: int
    """Index of its line in the file, from 0."""
    domain: str
    task_id: str
    trial: int
    reward: float
    messages: tuple[dict[str, Any], ...]
    """Messages as tau2 records them, with the user's own tool calls."""


def read_trajectories(
    path: str | Path, domains: Collection[str] | None = None
) -> list[Trajectory]:
    """Read the episodes of some domains, or of all, in the order of the file.

    Raises:
        ValueError: the file cannot be read, a line is not an episode, or none belongs
            to the domains.
    """
    for name in domains or ():
        find_domain(name)
    trajectories = []
    for number, row in read_jsonl(path, _EXPECTED):
        try:
            trajectory = _parse(number - 1, row)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if domains is None or trajectory.domain in domains:
            trajectories.append(trajectory)
    if not trajectories:
        wanted = "" if domains is None else f" of {', '.join(domains)}"
        raise ValueError(f"{path} holds no trajectory{wanted}")
    return trajectories


def _parse(episode: int, row: dict[str, Any]) -> Trajectory:
    for name, types in _FIELDS.items():
        if not isinstance(row.get(name), types):
            expected = " or ".join(t.__name__ for t in types)
            raise ValueError(f"{name}={row.get(name)!r:.80}; expected {expected}")
    if not all(isinstance(message, dict) for message in row["messages"]):
        raise ValueError("messages holds something that is not an object")
    find_domain(row["domain"])
    return Trajectory(
        episode=episode,
        domain=row["domain"],
        task_id=row["task_id"],
        trial=row["trial"],
        reward=float(row["reward"]),
        messages=tuple(row["messages"]),
    )
