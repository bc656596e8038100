"""Partitions against trees that are really built, brute force, and what must hold."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.balance import Pricing, minibatches, partition
from areal_dta.balance.contiguous import contiguous_cuts
from areal_dta.balance.first_fit import by_tokens, by_tree_tokens
from areal_dta.balance.local_search import local_search
from areal_dta.balance.partition import METHODS
from areal_dta.balance.pricing import RangePrices, outputs_in_order, price_subsets
from areal_dta.schedule import NeededOutputs, build_schedule
from areal_dta.schedule.block_features import FORWARD, TRAINING
from areal_dta.tree import LeafOrder, PrefixTree
from tests.balance.shapes import COST, PRICING, conversations
from tests.builders import batches, leaf_order


def pairs_of(tree):
    return sum(n.end * (n.end + 1) - n.start * (n.start + 1) for n in tree.nodes) // 2


def by_hand(batch, pricing=PRICING):
    """Seconds of a batch from its real tree; rows and loss tokens by sequence."""
    tree = PrefixTree.from_sequences(batch)
    tokens = sum(map(len, batch))
    return (
        pricing.per_token * tree.num_tree_tokens
        + pricing.per_pair * pairs_of(tree)
        + (pricing.per_output + pricing.per_loss_token) * tokens
    )


def test_segments_of_branches_and_forks():
    pricing = dataclasses.replace(PRICING, per_segment=100.0)
    order = leaf_order([[1, 2, 3], [1, 2, 3], [1, 2, 4], [5]])

    def segments(p):
        return p.branches(order.length_N, order.lcp_N).sum() / 100

    # [1, 2], [3], [4], [5]; a duplicate adds none
    assert segments(pricing) - segments(PRICING) == pytest.approx(4)


def in_order(batch):
    order = leaf_order(batch)
    return order, [batch[i] for i in order.sequence_N]


# ---- prices


@given(batches(), st.data())
def test_a_range_costs_what_its_tree_does(batch, data):
    order, ordered = in_order(batch)
    prices = RangePrices(PRICING, order, order.length_N)
    start = data.draw(st.integers(0, len(batch)))
    end = data.draw(st.integers(start, len(batch)))
    assert prices.price(start, end) == pytest.approx(by_hand(ordered[start:end]))


@given(batches(), st.data())
def test_any_subset_costs_what_its_tree_does(batch, data):
    order, ordered = in_order(batch)
    rank_N = np.array([data.draw(st.integers(0, 2)) for _ in batch], np.int64)
    seconds, tokens = price_subsets(PRICING, order, order.length_N, rank_N, 3)
    for rank in range(3):
        part = [s for s, r in zip(ordered, rank_N, strict=True) if r == rank]
        assert seconds[rank] == pytest.approx(by_hand(part))
        assert tokens[rank] == PrefixTree.from_sequences(part).num_tree_tokens


def test_what_is_recomputed_is_priced_forward_only():
    # one sequence of 100 tokens; the 60 that are furthest from its end run twice
    order = LeafOrder.from_arrays([100], [0])
    pricing = Pricing.from_cost_model(COST, block_tokens=10, retain_tokens=40)
    once = Pricing.from_cost_model(COST, block_tokens=10)
    extra = RangePrices(pricing, order, order.length_N).price(0, 1)
    extra -= RangePrices(once, order, order.length_N).price(0, 1)
    c = COST.coefficients(FORWARD)
    expected = 60 * (c.per_no_grad_token + c.per_block / 10) + 60 * 61 / 2 * c.per_pair
    assert extra == pytest.approx(expected)


def test_the_price_is_near_that_of_the_schedule():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, 300)
    batch = [np.concatenate([prompt, rng.integers(0, 50, 200)]) for _ in range(20)]
    tree = PrefixTree.from_sequences(batch)
    schedule = build_schedule(tree, 512, needed=NeededOutputs.all(tree))
    order = LeafOrder.from_tree(tree)
    approximate = RangePrices(PRICING, order, order.length_N).price(0, 20)
    # rows are counted for each sequence; these share a prompt
    approximate -= 19 * 300 * PRICING.per_output
    assert approximate == pytest.approx(COST.schedule_seconds(tree, schedule), rel=0.05)


# ---- cuts


def best_cuts(prices, num_ranks):
    n = len(prices)
    inner = itertools.combinations_with_replacement(range(n + 1), num_ranks - 1)
    return min(
        max(prices.price(a, b) for a, b in itertools.pairwise((0, *cuts, n)))
        for cuts in inner
    )


@settings(deadline=None)
@given(batches(max_sequences=8), st.integers(1, 4))
def test_cuts_are_as_good_as_brute_force(batch, num_ranks):
    order, _ = in_order(batch)
    prices = RangePrices(PRICING, order, order.length_N)
    bounds = contiguous_cuts(prices, num_ranks, slack=0.0)
    assert bounds[0] == 0 and bounds[-1] == len(batch)
    assert (np.diff(bounds) >= 0).all()
    most = max(prices.price(a, b) for a, b in itertools.pairwise(bounds.tolist()))
    assert most <= best_cuts(prices, num_ranks) * (1 + 1e-5)


@settings(deadline=None)
@given(batches(max_sequences=8), st.integers(2, 4), st.sampled_from([0.0, 0.1]))
def test_no_cuts_within_the_limit_cost_less_in_all(batch, num_ranks, slack):
    order, _ = in_order(batch)
    prices = RangePrices(PRICING, order, order.length_N)
    bounds = contiguous_cuts(prices, num_ranks, slack).tolist()
    limit = best_cuts(prices, num_ranks) * (1 + slack)

    def total(cuts):
        parts = [prices.price(a, b) for a, b in itertools.pairwise(cuts)]
        return sum(parts) if max(parts) <= limit else np.inf

    n = len(prices)
    inner = itertools.combinations_with_replacement(range(n + 1), num_ranks - 1)
    least = min(total((0, *cuts, n)) for cuts in inner)
    used = sum(prices.price(a, b) for a, b in itertools.pairwise(bounds))
    assert used <= least * (1 + 1e-9)


@settings(deadline=None)
@given(batches(), st.integers(2, 4), st.data())
def test_moves_never_make_it_slower(batch, num_ranks, data):
    order, _ = in_order(batch)
    prices = RangePrices(PRICING, order, order.length_N)
    ranks = st.integers(0, num_ranks - 1)
    rank_N = np.array([data.draw(ranks) for _ in batch], np.int64)
    moved_N, num_moves, _ = local_search(PRICING, order, prices, rank_N, num_ranks)
    before, _ = price_subsets(PRICING, order, order.length_N, rank_N, num_ranks)
    after, _ = price_subsets(PRICING, order, order.length_N, moved_N, num_ranks)
    if num_moves:
        assert after.max() <= before.max()
    else:
        assert moved_N.tolist() == rank_N.tolist()


def test_a_long_branch_between_two_cuts_is_moved():
    # no cut of 400, 600, 200 gives two ranks of 600
    order = LeafOrder.from_arrays([400, 600, 200], [0, 0, 0])
    prices = RangePrices(PRICING, order, order.length_N)
    cut_N = np.array([0, 1, 1])
    moved_N, num_moves, _ = local_search(PRICING, order, prices, cut_N, 2)
    assert num_moves == 1
    assert moved_N[0] == moved_N[2] != moved_N[1]


# ---- plans


def check(plan, batch, num_ranks):
    given_out = [s for part in plan.assignments for s in part]
    assert sorted(given_out) == list(range(len(batch)))
    assert plan.num_ranks == num_ranks == len(plan.predicted_seconds)
    trees = [
        PrefixTree.from_sequences([batch[i] for i in part]) for part in plan.assignments
    ]
    total = sum(t.num_tree_tokens for t in trees)
    assert plan.num_tree_tokens == total
    whole = PrefixTree.from_sequences(batch)
    assert plan.num_repeated_tokens == total - whole.num_tree_tokens
    assert plan.num_sequence_tokens == whole.num_sequence_tokens
    place = np.argsort(LeafOrder.from_tree(whole).sequence_N)
    for part, seconds in zip(plan.assignments, plan.predicted_seconds, strict=True):
        assert seconds == pytest.approx(by_hand([batch[i] for i in part]))
        positions = [int(place[i]) for i in part]
        assert positions == sorted(positions)
    for candidate in plan.candidates:
        assert plan.makespan_seconds <= candidate.makespan_seconds * 1.006


@settings(deadline=None)
@given(batches(), st.integers(1, 5))
def test_every_sequence_is_given_to_one_rank(batch, num_ranks):
    check(partition(leaf_order(batch), num_ranks, PRICING), batch, num_ranks)


@settings(deadline=None)
@given(batches(), st.integers(1, 4), st.sampled_from(METHODS), st.data())
def test_so_does_each_method(batch, num_ranks, method, data):
    groups = [data.draw(st.integers(-3, 3)) for _ in batch]
    order = leaf_order(batch)
    plan = partition(order, num_ranks, PRICING, groups=groups, methods=[method])
    check(plan, batch, num_ranks)
    assert plan.method == method and len(plan.candidates) == 1


@settings(deadline=None)
@given(batches(), st.integers(1, 4), st.integers(0, 99))
def test_the_order_of_arrival_does_not_matter(batch, num_ranks, seed):
    def contents(sequences):
        plan = partition(leaf_order(sequences), num_ranks, PRICING)
        return [[tuple(sequences[i]) for i in part] for part in plan.assignments], plan

    shuffled = [batch[i] for i in np.random.default_rng(seed).permutation(len(batch))]
    (a, plan), (b, other) = contents(batch), contents(shuffled)
    assert a == b
    assert plan.predicted_seconds == other.predicted_seconds
    assert plan.candidates == other.candidates


def test_nothing_to_do_and_fewer_sequences_than_ranks():
    empty = partition(LeafOrder.from_arrays([], []), 3, PRICING)
    assert empty.assignments == ((), (), ()) and empty.imbalance == 1.0
    assert empty.makespan_seconds == 0
    two = partition(leaf_order([[1, 2], [3]]), 4, PRICING)
    assert sorted(map(len, two.assignments)) == [0, 0, 1, 1]
    unread = LeafOrder.from_tree(PrefixTree.from_sequences([[1], [2]]), [0, 0])
    plan = partition(unread, 2, PRICING, num_outputs=[0, 0])
    assert sorted(s for part in plan.assignments for s in part) == [0, 1]


def test_bad_arguments_are_refused():
    order = leaf_order([[1], [2]])
    with pytest.raises(ValueError, match="num_ranks=0"):
        partition(order, 0, PRICING)
    with pytest.raises(ValueError, match="methods"):
        partition(order, 1, PRICING, methods=["best"])
    with pytest.raises(ValueError, match="num_outputs has shape"):
        partition(order, 1, PRICING, num_outputs=[1])
    with pytest.raises(ValueError, match="groups has shape"):
        partition(order, 1, PRICING, groups=[1, 2, 3])
    with pytest.raises(ValueError, match="block_tokens=0"):
        Pricing.from_cost_model(COST, block_tokens=0)
    with pytest.raises(ValueError, match="retain_tokens=-1"):
        Pricing.from_cost_model(COST, retain_tokens=-1)


def test_the_field_keeps_prompts_together():
    order, prompts, _ = conversations(6, 2, 4)
    for method in (by_tokens, by_tree_tokens):
        rank_N = method(order, prompts, 2)
        for prompt in range(6):
            assert len(set(rank_N[prompts == prompt])) == 1


def test_a_prompt_larger_than_a_share_is_split():
    order, prompts, _ = conversations(1, 8, 12)
    assert len(set(by_tree_tokens(order, prompts, 4).tolist())) == 4


# ---- minibatches


@settings(deadline=None)
@given(batches(), st.integers(1, 4), st.integers(0, 9), st.data())
def test_minibatches_hold_whole_prompts(batch, num_minibatches, seed, data):
    groups = [data.draw(st.integers(0, 4)) for _ in batch]
    order = leaf_order(batch)
    parts = minibatches(order, groups, num_minibatches, seed)
    num_groups = len(set(groups))
    assert len(parts) == max(1, min(num_minibatches, num_groups))
    assert sorted(s for part in parts for s in part) == list(range(len(batch)))
    prompts = [{groups[s] for s in part} for part in parts]
    assert sum(map(len, prompts)) == num_groups  # none in two parts
    sizes = [len(p) for p in prompts]
    assert max(sizes) - min(sizes) <= 1
    assert parts == minibatches(order, groups, num_minibatches, seed)


def test_minibatches_are_shuffled_by_the_seed_and_not_by_arrival():
    batch = [[i // 2, i] for i in range(20)]
    groups = [i // 2 for i in range(20)]

    def contents(permutation, seed):
        sequences = [batch[i] for i in permutation]
        order = leaf_order(sequences)
        parts = minibatches(order, [groups[i] for i in permutation], 3, seed)
        return [[sequences[s] for s in part] for part in parts]

    arrived = np.random.default_rng(0).permutation(20)
    assert contents(range(20), 1) == contents(arrived, 1)
    assert len({str(contents(range(20), seed)) for seed in range(10)}) > 5


def test_one_minibatch_is_the_batch():
    order = leaf_order([[3], [1], [2]])
    assert minibatches(order, [0, 1, 2], 1, seed=0) == ((1, 2, 0),)
    with pytest.raises(ValueError, match="num_minibatches=0"):
        minibatches(order, None, 0, seed=0)


def test_rows_are_put_in_order():
    order = leaf_order([[2, 2], [1]])
    assert outputs_in_order(order, [7, 5]).tolist() == [5, 7]
    assert outputs_in_order(order, None).tolist() == [1, 2]
    assert {TRAINING, FORWARD} == {"training", "forward"}
