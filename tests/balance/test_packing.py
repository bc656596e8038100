"""Packings of whole branches, and bounds against all partitions of small batches."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.balance.packing import min_makespan, packings
from areal_dta.balance.pricing import RangePrices, price_subsets
from areal_dta.tree import LeafOrder
from tests.balance.bounds import min_total
from tests.balance.shapes import PRICING, conversations
from tests.builders import batches, leaf_order


def priced(order):
    return RangePrices(PRICING, order, order.length_N)


def all_partitions(order, num_ranks):
    """Seconds of each rank, and whether none is empty, for every assignment."""
    for ranks in itertools.product(range(num_ranks), repeat=len(order)):
        rank_N = np.array(ranks, np.int64)
        seconds, _ = price_subsets(PRICING, order, order.length_N, rank_N, num_ranks)
        yield seconds, len(set(ranks)) == num_ranks


@settings(max_examples=40)
@given(batches(max_sequences=6), st.integers(1, 3), st.floats(0.3, 1.1))
def test_no_partition_is_below_the_bounds(batch, num_ranks, share):
    order = leaf_order(batch)
    prices = priced(order)
    least = min_makespan(PRICING, order, prices, num_ranks)
    limit = prices.price(0, len(order)) * share
    total = min_total(PRICING, order, prices, num_ranks)
    within = min_total(PRICING, order, prices, num_ranks, limit)
    assert within >= total
    for seconds, is_full in all_partitions(order, num_ranks):
        assert seconds.max() >= least * (1 - 1e-9)
        if is_full:
            assert seconds.sum() >= total * (1 - 1e-9)
        if is_full and seconds.max() <= limit:
            assert seconds.sum() >= within * (1 - 1e-9)


def test_a_branch_beyond_the_limit_repeats_the_path_to_its_cut():
    # calls of one conversation, each 100 tokens further than the one before; another
    # branch; 10 tokens in front of all
    order = LeafOrder.from_arrays([150, 250, 350, 60], [0, 110, 210, 10])
    prices = priced(order)
    free = min_total(PRICING, order, prices, 2)
    assert free == pytest.approx(prices.price(0, 4) + PRICING.path(10))
    # the two deepest calls fit: the first is cut off where it leaves their path
    limit = prices.price(1, 3)
    cut = min_total(PRICING, order, prices, 2, limit)
    assert cut == pytest.approx(free + PRICING.path(110) - PRICING.path(10))
    seconds, _ = price_subsets(
        PRICING, order, order.length_N, np.array([1, 0, 0, 1], np.int64), 2
    )
    assert seconds.max() == pytest.approx(limit)
    assert seconds.sum() == pytest.approx(cut)  # so the bound is reached
    alone = prices.price(2, 3)
    assert min_total(PRICING, order, prices, 2, alone * 0.99) == np.inf


@settings(deadline=None)
@given(batches(), st.integers(1, 5))
def test_packings_give_each_sequence_a_rank(batch, num_ranks):
    order = leaf_order(batch)
    made = list(packings(PRICING, order, priced(order), num_ranks))
    assert bool(made) == bool(batch)
    for rank_N in made:
        assert rank_N.shape == (len(batch),)
        assert ((rank_N >= 0) & (rank_N < num_ranks)).all()


def test_branches_stay_whole_and_fill_the_ranks():
    # four conversations of two calls each, in whole pairs just as large
    order = LeafOrder.from_arrays(
        [400, 500, 300, 400, 500, 600, 200, 300], [0, 400, 0, 300, 0, 500, 0, 200]
    )
    rank_N = next(packings(PRICING, order, priced(order), 2))
    branches = rank_N.reshape(4, 2)
    assert (branches[:, 0] == branches[:, 1]).all()
    # 600 + 300 and 500 + 400
    assert branches[2, 0] == branches[3, 0] != branches[0, 0] == branches[1, 0]


def test_branches_go_where_they_share_a_path():
    # two prompts of two answers; the prompts are longer than the answers
    order = LeafOrder.from_arrays([350, 360, 340, 330], [0, 300, 0, 300])
    rank_N = next(packings(PRICING, order, priced(order), 2))
    assert rank_N[0] == rank_N[1] != rank_N[2] == rank_N[3]


def test_what_does_not_fit_is_split():
    order, _, _ = conversations(1, 1, 12)
    for rank_N in packings(PRICING, order, priced(order), 2):
        assert set(rank_N.tolist()) == {0, 1}


def test_prompts_with_nothing_in_common():
    # two system prompts: a rank holds the branches of one
    order = LeafOrder.from_arrays(
        [900, 910, 920, 900, 910, 920], [0, 700, 700, 0, 700, 700]
    )
    rank_N = next(packings(PRICING, order, priced(order), 2))
    assert len(set(rank_N[:3])) == len(set(rank_N[3:])) == 1
    assert rank_N[0] != rank_N[3]


def test_too_many_branches_are_not_packed():
    n = 20_001
    order = LeafOrder.from_arrays(np.full(n, 50), np.zeros(n, np.int64))
    assert not list(packings(PRICING, order, priced(order), 20_000))
    assert not list(packings(PRICING, LeafOrder.from_arrays([], []), None, 2))
