"""Which entered fragments keep their graph until their exit: the least recomputation.

A fragment that keeps its graph costs memory while anything below it runs; one that does
not runs its trunk twice. Wanted is the set with the most trunk tokens, such that at
any exit the graphs alive, those of kept ancestors and the fragment's own, are at most
``retain_tokens`` (or the fragment's own alone: it has to run).

Method: dynamic programming over (fragment, tokens left by its ancestors), tokens
counted in units so that the table stays small; units are rounded up, so the limit
holds. The simple rule "keep what has a short enough chain of fragments below it" is
compared, and wins where rounding costs more than it does.

The order in which siblings are visited changes neither this nor the peak: each one's
graphs are gone before the next begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_dta.schedule.fragments import Fragment

_MOST_UNITS = 4096
_MOST_ENTRIES = 2**24
_NEVER = -(2**40)  # below any count; sums of many do not overflow


def choose_retained(
    fragments: Sequence[Fragment], retain_tokens: int | None
) -> list[bool]:
    """For each fragment whether its graph lives from enter to exit.

    Args:
        fragments: in depth-first order.
        retain_tokens: most tokens whose graph is alive at once; None: no limit.
    """
    inner = [bool(f.children) for f in fragments]
    if retain_tokens is None:
        return inner
    chain = [f.num_tokens for f in fragments]
    for f in reversed(fragments):  # children come after their parent
        chain[f.index] += max((chain[c] for c in f.children), default=0)
    simple = [i and n <= retain_tokens for i, n in zip(inner, chain, strict=True)]
    if retain_tokens == 0 or simple == inner:
        return simple
    best = _solve(fragments, retain_tokens)
    return max(simple, best, key=lambda kept: _saved(fragments, kept))


def _saved(fragments: Sequence[Fragment], kept: Sequence[bool]) -> int:
    return sum(
        f.num_trunk_tokens
        for f, is_kept in zip(fragments, kept, strict=True)
        if is_kept
    )


def _solve(fragments: Sequence[Fragment], retain_tokens: int) -> list[bool]:
    num_units = min(retain_tokens, _MOST_UNITS, max(1, _MOST_ENTRIES // len(fragments)))
    size = [-(-f.num_tokens * num_units // retain_tokens) for f in fragments]
    # saved[f][left]: most trunk tokens kept in f's subtree with that many units left
    saved = np.zeros((len(fragments), num_units + 1), np.int64)
    keeps = np.zeros(saved.shape, bool)
    for f in reversed(fragments):
        below = saved[list(f.children)].sum(0)
        np.maximum(below, _NEVER, out=below)
        n = size[f.index]
        leave = below.copy()
        leave[: min(n, num_units)] = _NEVER  # its own exit would not fit
        if f.children and n <= num_units:
            keep = np.full_like(leave, _NEVER)
            keep[n:] = f.num_trunk_tokens + below[: num_units + 1 - n]
            keeps[f.index] = keep > leave
            leave = np.maximum(keep, leave)
        saved[f.index] = leave

    kept = [False] * len(fragments)
    left = [num_units] * len(fragments)
    for f in fragments:
        if f.parent >= 0:
            above = f.parent
            left[f.index] = left[above] - size[above] * kept[above]
        kept[f.index] = bool(keeps[f.index][left[f.index]])
    return kept
