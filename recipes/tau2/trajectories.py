"""Recorded episodes: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.tau2.domains import find_domain

_FIELDS: dict[str, tuple[type, ...]] = {
    "domain": (str,),
    "task_id": (str,),
    "trial": (int,),
    "reward": (int, float),
    "messages": (list,),
}


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One recorded episode."""

    episode: int
    """Its line in the file, from 0."""
    domain: str
    task_id: str
    trial: int
    reward: float
    messages: tuple[dict[str, Any], ...]
    """As tau2 records them, the user's own tool calls among them."""


def read_trajectories(
    path: str | Path, domains: Collection[str] | None = None
) -> list[Trajectory]:
    """Read the episodes of some domains (all if None), in the order of the file.

    Raises:
        ValueError: the file cannot be read, a line is no episode (it is named), or none
            belongs to the domains.
    """
    for name in domains or ():
        find_domain(name)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the trajectories: {error}") from error
    trajectories = []
    for episode, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            trajectory = _parse(episode, line)
        except ValueError as error:
            raise ValueError(f"{path}, line {episode + 1}: {error}") from error
        if domains is None or trajectory.domain in domains:
            trajectories.append(trajectory)
    if not trajectories:
        wanted = "" if domains is None else f" of {', '.join(domains)}"
        raise ValueError(f"{path} holds no trajectory{wanted}")
    return trajectories


def _parse(episode: int, line: str) -> Trajectory:
    row = json.loads(line)  # JSONDecodeError is a ValueError
    if not isinstance(row, dict):
        raise ValueError(f"got a JSON {type(row).__name__}; expected an object")
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
