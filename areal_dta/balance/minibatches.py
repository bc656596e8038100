"""Minibatches of whole prompts, and micro-batches within a rank.

AReaL splits each rank's rows by token count into ``ppo_n_minibatches``; a prompt may
then be trained in several optimizer steps. Here the batch is split before it is handed
to ranks, by prompts, so every rank takes the same number of optimizer steps.
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
    """Sequences of each minibatch, depth first: whole prompts in a seeded shuffle.

    Numbers of prompts differ by one at most. Fewer prompts than minibatches give as
    many minibatches as there are prompts: none is empty (but for an empty batch).

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


def micro_batches(
    order: LeafOrder, max_tree_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """A rank's sequences in runs of at most ``max_tree_tokens`` tree tokens, as few as
    contiguous runs can be. A sequence beyond the budget gets a run of its own.

    Raises:
        ValueError: the budget is below 1.
    """
    if max_tree_tokens < 1:
        raise ValueError(f"max_tree_tokens={max_tree_tokens}; expected at least 1")
    before = np.concatenate([[0], np.cumsum(order.length_N - order.lcp_N)])
    runs, at = [], 0
    while at < len(order):
        reach = before[at] - order.lcp_N[at] + max_tree_tokens
        end = max(at + 1, int(before.searchsorted(reach, side="right")) - 1)
        runs.append(tuple(order.sequence_N[at:end].tolist()))
        at = end
    return tuple(runs)
