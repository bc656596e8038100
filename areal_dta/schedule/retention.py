"""Choose the entered fragments that keep their graph until their exit.

A fragment that keeps its graph costs memory while anything below it runs; one that does
not runs its trunk twice. Chosen is the set with the most trunk tokens such that, at any
exit,

    tokens of kept ancestors + the fragment's own tokens <= retain_tokens

(or only its own: it has to run). Sibling order matters to neither this nor the peak:
the graphs of one sibling are gone before the next begins.

Method: dynamic programming over (fragment, tokens left by its ancestors). Tokens are
counted in units, rounded up, so that the table stays small and the limit holds. "Keep
each fragment whose chain of descendants is short enough" is compared, and wins where
rounding costs more. tests/schedule/test_retention.py compares with brute force.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_dta.schedule.fragments import Fragment

_MAX_UNITS = 4096  # exact for budgets up to this many tokens
_MAX_ENTRIES = 2**24  # of the table: 150 MB
_NEVER = -(2**40)  # below any count; sums of many do not overflow


def choose_retained(
    fragments: Sequence[Fragment], retain_tokens: int | None
) -> list[bool]:
    """Return, per fragment, whether its graph lives from enter to exit.

    Args:
        fragments: in depth-first order.
        retain_tokens: maximum number of tokens whose graph is alive at once; None for
            no limit.
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
    return max(
        (simple, best),
        key=lambda kept: sum(f.num_trunk_tokens * kept[f.index] for f in fragments),
    )


def _solve(fragments: Sequence[Fragment], retain_tokens: int) -> list[bool]:
    """Solve the dynamic program in units of retain_tokens / num_units tokens."""
    num_units = min(retain_tokens, _MAX_UNITS, max(1, _MAX_ENTRIES // len(fragments)))
    size = [-(-f.num_tokens * num_units // retain_tokens) for f in fragments]
    # Bottom up. saved[f][left]: maximum trunk tokens kept in f's subtree where its
    # ancestors leave that many units.
    saved = np.zeros((len(fragments), num_units + 1), np.int64)
    keeps = np.zeros(saved.shape, bool)
    for f in reversed(fragments):
        below = saved[list(f.children)].sum(0)
        np.maximum(below, _NEVER, out=below)
        n = size[f.index]
        drop = below.copy()
        drop[: min(n, num_units)] = _NEVER  # its own exit would not fit
        if f.children and n <= num_units:
            keep = np.full_like(drop, _NEVER)
            keep[n:] = f.num_trunk_tokens + below[: num_units + 1 - n]
            keeps[f.index] = keep > drop
            drop = np.maximum(keep, drop)
        saved[f.index] = drop

    # Top down: read off the choices.
    kept = [False] * len(fragments)
    left = [num_units] * len(fragments)
    for f in fragments:
        if f.parent >= 0:
            above = f.parent
            left[f.index] = left[above] - size[above] * kept[above]
        kept[f.index] = bool(keeps[f.index][left[f.index]])
    return kept
