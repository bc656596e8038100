"""Counts, known before a block runs, that its cost depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_dta.schedule.schedule import Schedule, Step
from areal_dta.tree import PrefixTree
from areal_dta.tree.prefix_tree import attended_pairs

TRAINING, FORWARD = "training", "forward"
KINDS = (TRAINING, FORWARD)
"""Kinds of blocks. TRAINING: with an autograd graph, forward and backward together.
FORWARD: without one, in a forward-only pass or before a recomputation."""


@dataclass(frozen=True, slots=True)
class BlockFeatures:
    """Counts of one call of the model, or sums over several."""

    num_blocks: float
    """1 for one block."""
    num_grad_tokens: float
    """Tokens run with a graph, forward and backward."""
    num_no_grad_tokens: float
    num_pairs: float
    """(query, key) pairs, keys on the path included."""
    num_outputs: float
    """Positions projected onto the vocabulary."""
    num_loss_tokens: float
    """Tokens of the sequences whose loss is evaluated at the block's exit."""
    num_segments: float = 0
    """Segments: a layer that carries a state pads each of them to whole chunks."""

    def as_tuple(self) -> tuple[float, ...]:
        return dataclasses.astuple(self)


NUM_FEATURES = len(dataclasses.fields(BlockFeatures))
SAMPLE_FLOATS = NUM_FEATURES + 2
"""Numbers of a sample as it is sent: `BlockSample.to_floats`."""


@dataclass(frozen=True, slots=True)
class BlockSample:
    """One measured block."""

    features: BlockFeatures
    seconds: float
    """Measured time; a TRAINING block's forward (at enter) plus backward (at exit)."""
    kind: str
    """TRAINING or FORWARD."""

    def to_floats(self) -> tuple[float, ...]:
        """Return features, seconds and index of the kind, to send between processes.

        ``samples_from_array`` undoes it.
        """
        return *self.features.as_tuple(), self.seconds, float(KINDS.index(self.kind))


def samples_from_array(samples_N9: NDArray[np.float64]) -> list[BlockSample]:
    """Rebuild samples from stacked ``BlockSample.to_floats``."""
    rows = np.asarray(samples_N9, np.float64).reshape(-1, SAMPLE_FLOATS)
    return [
        BlockSample(BlockFeatures(*x[:NUM_FEATURES]), x[-2], KINDS[int(x[-1])])
        for x in rows.tolist()
    ]


def step_kind(step: Step) -> str:
    """Return the kind of the block that a computing step runs."""
    return TRAINING if step.with_grad else FORWARD


def step_features(tree: PrefixTree, schedule: Schedule, step: Step) -> BlockFeatures:
    """Count the block that ``step`` runs forward; ``step.computes`` is not empty."""
    segments = schedule.cut.segments
    fragment = schedule.cut.fragments[step.fragment]
    pairs = loss_tokens = 0
    for s in step.computes:
        pairs += attended_pairs(segments[s].start, segments[s].end)
    if step.with_grad:
        loss_tokens = sum(map(tree.sequence_length, fragment.sequences))
    return BlockFeatures(
        num_blocks=1,
        num_grad_tokens=step.num_tokens * step.with_grad,
        num_no_grad_tokens=step.num_tokens * (not step.with_grad),
        num_pairs=pairs,
        num_outputs=step.num_outputs,
        num_loss_tokens=loss_tokens,
        num_segments=len(step.computes),
    )


def schedule_features(
    tree: PrefixTree, schedule: Schedule
) -> Iterator[tuple[str, BlockFeatures]]:
    """Yield kind and counts of each block of a schedule, in order."""
    for step in schedule.steps:
        if step.computes:
            yield step_kind(step), step_features(tree, schedule, step)
