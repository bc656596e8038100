"""Choose the entered fragments that keep their graph until their exit.

A fragment that keeps its graph costs memory while anything below it runs; one that does
not runs its trunk twice; one that keeps part of it (attention, not the MLPs) costs less
memory, and runs its MLPs twice. Chosen is what saves the most forward work such that,
at any exit,

    tokens of kept ancestors + the fragment's own tokens <= retain_tokens

(or only its own: it has to run), where tokens of partial graphs count by their size.
Sibling order matters to neither this nor the peak:
the graphs of one sibling are gone before the next begins.

Method: dynamic programming over (fragment, tokens left by its ancestors). Tokens are
counted in units, rounded up, so that the table stays small and the limit holds. "Keep
each fragment whose chain of descendants is short enough" is compared, and wins where
rounding costs more. tests/schedule/test_retention.py compares with brute force.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from areal_dta.schedule.fragments import Fragment

_MAX_UNITS = 4096  # exact for budgets up to this many tokens
_MAX_ENTRIES = 2**24  # of the table: 150 MB
_NEVER = -(2**40)  # below any count; sums of many do not overflow


class Kept(IntEnum):
    """What of a fragment's graph lives from enter to exit."""

    NOTHING = 0
    ALL = 1
    PART = 2
    """All but the MLPs and norms, which run again in the backward."""


@dataclass(frozen=True, slots=True)
class PartialGraph:
    """Graphs without MLPs and norms, relative to whole ones."""

    size: float
    """Bytes, as a share of a whole graph's."""
    cost: float
    """Work to run the rest again, as a share of a forward's."""

    def tokens(self, num_tokens: int) -> int:
        """Return the tokens whose whole graphs take as much, rounded up."""
        return math.ceil(self.size * num_tokens)

    def saved(self, fragment: Fragment) -> int:
        """Return the tokens whose forward it saves; maybe less than 0."""
        return fragment.num_trunk_tokens - math.ceil(self.cost * fragment.num_tokens)


def choose_retained(
    fragments: Sequence[Fragment],
    retain_tokens: int | None,
    part: PartialGraph | None = None,
) -> list[Kept]:
    """Return, per fragment, what of its graph lives from enter to exit.

    Args:
        fragments: in depth-first order.
        retain_tokens: maximum number of tokens whose graph is alive at once; None for
            no limit.
        part: what partial graphs take and cost; None: they are no choice.
    """
    inner = [Kept(bool(f.children)) for f in fragments]
    if retain_tokens is None:
        return inner
    chain = [f.num_tokens for f in fragments]
    for f in reversed(fragments):  # children come after their parent
        chain[f.index] += max((chain[c] for c in f.children), default=0)
    simple = [Kept(i and n <= retain_tokens) for i, n in zip(inner, chain, strict=True)]
    if retain_tokens == 0 or simple == inner:
        return simple

    def saved(kept: list[Kept]) -> int:
        by_part = part.saved if part is not None else None
        return sum(
            f.num_trunk_tokens if k is Kept.ALL else by_part(f) if by_part else 0
            for f, k in zip(fragments, kept, strict=True)
            if k
        )

    return max((simple, _solve(fragments, retain_tokens, part)), key=saved)


def _solve(
    fragments: Sequence[Fragment], retain_tokens: int, part: PartialGraph | None
) -> list[Kept]:
    """Solve the dynamic program in units of retain_tokens / num_units tokens."""
    num_units = min(retain_tokens, _MAX_UNITS, max(1, _MAX_ENTRIES // len(fragments)))

    def units(num_tokens: int) -> int:
        return -(-num_tokens * num_units // retain_tokens)

    # What each fragment takes, by what it keeps, and the work that this saves.
    choices: list[dict[Kept, tuple[int, int]]] = []
    for f in fragments:
        of_f = {}
        if f.children:
            of_f[Kept.ALL] = units(f.num_tokens), f.num_trunk_tokens
            if part is not None and part.saved(f) > 0:
                of_f[Kept.PART] = units(part.tokens(f.num_tokens)), part.saved(f)
        choices.append(of_f)
    # Bottom up. saved[f][left]: maximum work saved in f's subtree where its ancestors
    # leave that many units.
    saved = np.zeros((len(fragments), num_units + 1), np.int64)
    keeps = np.zeros(saved.shape, np.int8)
    for f in reversed(fragments):
        below = saved[list(f.children)].sum(0)
        np.maximum(below, _NEVER, out=below)
        best = below.copy()
        best[: min(units(f.num_tokens), num_units)] = _NEVER  # its exit would not fit
        for kept, (n, gain) in choices[f.index].items():
            if n > num_units:
                continue
            keep = np.full_like(best, _NEVER)
            keep[n:] = gain + below[: num_units + 1 - n]
            keeps[f.index][keep > best] = kept
            best = np.maximum(keep, best)
        saved[f.index] = best

    # Top down: read off the choices.
    chosen = [Kept.NOTHING] * len(fragments)
    left = [num_units] * len(fragments)
    for f in fragments:
        if f.parent >= 0:
            above = f.parent
            taken, _ = choices[above].get(chosen[above], (0, 0))
            left[f.index] = left[above] - taken
        chosen[f.index] = Kept(int(keeps[f.index][left[f.index]]))
    return chosen
