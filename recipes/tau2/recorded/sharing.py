"""Statistics of sequences: their lengths, and how much of them they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from areal_dta.tree import PrefixTree
from recipes.tau2.recorded.sequences import SequenceBatch


@dataclass(frozen=True, slots=True)
class SharingStatistics:
    """Statistics of the sequences of one domain."""

    domain: str
    num_trajectories: int
    num_sequences: int
    length_mean: float
    length_p50: float
    length_max: int
    loss_share: float
    """Trained tokens / all tokens."""
    sharing_ratio: float
    """Tokens of all sequences / tokens of their prefix tree."""
    sharing_ratio_trajectory: float
    """Sharing ratio of one trajectory's sequences, mean over trajectories."""
    sharing_ratio_task: float
    """Sharing ratio of one task's sequences, mean over tasks."""


_COLUMNS: dict[str, Callable[[SharingStatistics], str]] = {
    "domain": lambda s: s.domain,
    "trajectories": lambda s: f"{s.num_trajectories:,}",
    "sequences": lambda s: f"{s.num_sequences:,}",
    "length mean / p50 / max": lambda s: (
        f"{s.length_mean:,.0f} / {s.length_p50:,.0f} / {s.length_max:,}"
    ),
    "loss tokens": lambda s: f"{s.loss_share:.2%}",
    "total / unique": lambda s: f"{s.sharing_ratio:.1f}",
    "within a trajectory": lambda s: f"{s.sharing_ratio_trajectory:.1f}",
    "within a task": lambda s: f"{s.sharing_ratio_task:.1f}",
}


def sharing_statistics(batch: SequenceBatch) -> list[SharingStatistics]:
    """Return one entry per domain, in order of first occurrence."""
    statistics = []
    for domain in dict.fromkeys(batch.domain.tolist()):
        chosen = np.flatnonzero(batch.domain == domain).tolist()
        lengths = batch.lengths[chosen]
        episodes = batch.episode[chosen].tolist()
        num_trained = sum(int(batch.mask(i).sum()) for i in chosen)
        tree = PrefixTree.from_sequences(batch.sequence(i) for i in chosen)
        statistics.append(
            SharingStatistics(
                domain=domain,
                num_trajectories=len(set(episodes)),
                num_sequences=len(chosen),
                length_mean=float(lengths.mean()),
                length_p50=float(np.median(lengths)),
                length_max=int(lengths.max()),
                loss_share=num_trained / int(lengths.sum()),
                sharing_ratio=tree.sharing_ratio,
                sharing_ratio_trajectory=_mean_ratio(batch, chosen, episodes),
                sharing_ratio_task=_mean_ratio(
                    batch, chosen, batch.task_id[chosen].tolist()
                ),
            )
        )
    return statistics


def _mean_ratio(
    batch: SequenceBatch, chosen: Sequence[int], keys: Iterable[Hashable]
) -> float:
    """Average the sharing ratios of the groups of `chosen` with equal keys."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in zip(chosen, keys, strict=True):
        groups.setdefault(key, []).append(index)
    ratios = [
        PrefixTree.from_sequences(batch.sequence(i) for i in group).sharing_ratio
        for group in groups.values()
    ]
    return float(np.mean(ratios))


def markdown_table(statistics: Sequence[SharingStatistics]) -> str:
    """Format one row per domain."""
    rows = [list(_COLUMNS), ["---"] * len(_COLUMNS)]
    rows += [[cell(s) for cell in _COLUMNS.values()] for s in statistics]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
