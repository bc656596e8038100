"""Bound on the total of any partition, to tell whether a plan could be cheaper.

A rank that holds any part of a conversation computes the whole path above it. So a
branch that costs more than a rank may take is repeated down to where it is cut.
"""

import math

import numpy as np


def min_total(pricing, order, prices, num_ranks, limit=math.inf):
    """Seconds of all ranks, at least, of any partition without an empty rank and with
    none above ``limit``; infinite if a sequence by itself exceeds the limit.

    That is one tree; the prefix common to all, once more per further rank; and per
    branch beyond the limit the shortest path that splitting it repeats.
    """
    n = len(order)
    if not n:
        return 0.0
    common = order.num_common_tokens
    total = prices.price(0, n) + (min(num_ranks, n) - 1) * pricing.path(common)
    if prices.price(0, n) <= limit:
        return total
    cuts = np.flatnonzero(order.lcp_N[1:] <= common) + 1
    bounds = [0, *cuts.tolist(), n]
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        if prices.price(start, end) > limit:
            depth = cut_depth(order.lcp_N, prices, start, end, limit)
            if depth is None:
                return math.inf
            total += pricing.path(depth) - pricing.path(common)
    return total


def cut_depth(lcp_N, prices, start, end, limit):
    """Tokens of the path that is repeated, at least, where a branch is split into parts
    within the limit.

    If its parts have at most ``depth`` tokens in common, then all that shares more than
    that with a sequence is on that sequence's rank, and has to fit.
    """
    deepest = 0
    left = [(start, end, 0)]
    while left:
        first, last, depth = left.pop()
        if prices.price(first, last) <= limit:
            deepest = max(deepest, depth)
        elif last - first == 1:
            return None
        else:
            inner = lcp_N[first + 1 : last]
            depth = int(inner.min())
            forks = (np.flatnonzero(inner == depth) + first + 1).tolist()
            for a, b in zip([first, *forks], [*forks, last], strict=True):
                left.append((a, b, depth))
    return deepest
