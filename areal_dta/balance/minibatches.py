"""Split a batch into minibatches of whole prompts.

AReaL splits each rank's rows by token count into ``ppo_n_minibatches``; a prompt may
then be trained in several optimizer steps. Here the batch is split by prompts before it
is given to ranks, so that every rank takes the same number of optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_dta.balance.partition import groups_in_order
from areal_dta.tree.leaf_order import IntArray, LeafOrder


def minibatches(
    order: LeafOrder,
    groups: Sequence[int] | IntArray | None,
    num_minibatches: int,
    seed: int,
) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of each minibatch, depth first: prompts in seeded shuffle.

    Minibatches differ by at most one prompt. There are no more minibatches than
    prompts, so that none is empty (except that of an empty batch).

    Raises:
        ValueError: ``num_minibatches`` is below 1, or ``groups`` does not fit.
    """
    if num_minibatches < 1:
        raise ValueError(f"num_minibatches={num_minibatches}; expected at least 1")
    group_N = groups_in_order(order, groups)
    num_groups = int(group_N.max(initial=-1)) + 1
    num_parts = max(1, min(num_minibatches, num_groups))
    shuffled = np.arange(num_groups)
    if num_parts > 1:  # one minibatch is the batch itself
        np.random.default_rng(seed).shuffle(shuffled)
    part_of = np.empty(num_groups, np.int64)
    part_of[shuffled] = np.arange(num_groups) * num_parts // max(1, num_groups)
    part_N = part_of[group_N]
    return tuple(
        tuple(order.sequence_N[part_N == part].tolist()) for part in range(num_parts)
    )
