"""Graphs are kept where that saves the most recomputation, within the budget."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_dta.schedule import build_schedule
from areal_dta.schedule.retention import choose_retained
from areal_dta.tree import PrefixTree
from tests.builders import batches, every_token, make_tree


def least_recomputed(schedule, retain_tokens: int) -> int:
    """Best of all sets of kept fragments, by trying each."""
    fragments = schedule.cut.fragments
    inner = [f for f in fragments if f.children]
    best = sum(f.num_trunk_tokens for f in inner)
    for r in range(len(inner) + 1):
        for kept in itertools.combinations([f.index for f in inner], r):
            alive = [0] * len(fragments)  # kept above
            fits = True
            for f in fragments:
                if f.parent >= 0:
                    above = fragments[f.parent]
                    alive[f.index] = alive[above.index]
                    alive[f.index] += above.num_tokens * (above.index in kept)
                total = alive[f.index] + f.num_tokens
                alone = alive[f.index] == 0 and f.index not in kept
                fits = fits and (total <= retain_tokens or alone)
            if fits:
                cost = sum(f.num_trunk_tokens for f in inner if f.index not in kept)
                best = min(best, cost)
    return best


@settings(max_examples=150, deadline=None)
@given(batches(7, 10), st.integers(1, 4), st.integers(0, 30))
def test_no_choice_recomputes_less(batch, block_tokens, retain_tokens):
    tree = PrefixTree.from_sequences(batch)
    needed = every_token(tree)
    schedule = build_schedule(tree, block_tokens, retain_tokens, needed=needed)
    assume(sum(bool(f.children) for f in schedule.cut.fragments) <= 10)
    assert schedule.num_recomputed_tokens == least_recomputed(schedule, retain_tokens)
    assert schedule.peak_graph_tokens <= max(retain_tokens, block_tokens)


def test_an_ancestor_is_kept_where_one_deep_branch_would_forbid_it():
    """The chain below `aaaa` has 8 tokens, so "keep what has a short chain" would keep
    `bb` and run four tokens again. But `aaaa` fits if `bb` is not kept."""
    tree = make_tree("aaaabbcc", "aaaabbdd", "aaaaxx")
    needed = every_token(tree)
    schedule = build_schedule(tree, 4, 6, needed=needed, fragments="node")
    kept = choose_retained(schedule.cut.fragments, 6)
    assert [f.num_tokens for f in schedule.cut.fragments] == [4, 2, 2, 2, 2]
    assert kept == [True, False, False, False, False]
    assert schedule.num_recomputed_tokens == 2
    assert schedule.peak_graph_tokens == 6


@pytest.mark.parametrize("retain_tokens", [700, 5000, 40000])
def test_the_budget_holds_where_tokens_are_counted_in_units(retain_tokens):
    batch = [
        [*range(1, 900), *[1000 + i] * 300, *[2000 + j] * (150 + 7 * j)]
        for i in range(12)
        for j in range(12)
    ]
    tree = PrefixTree.from_sequences(batch)
    schedule = build_schedule(tree, 128, retain_tokens)
    assert schedule.peak_graph_tokens <= retain_tokens
    assert schedule.num_recomputed_tokens < 899 + 12 * 300


@settings(max_examples=60, deadline=None)
@given(batches(9, 8), st.integers(1, 6), st.integers(0, 20), st.randoms())
def test_the_order_of_siblings_changes_neither_recomputation_nor_peak(
    batch, block_tokens, retain_tokens, random
):
    """Renaming tokens reorders siblings: the tree is sorted by them."""
    names = list(range(400))
    random.shuffle(names)
    counts = set()
    for relabel in (lambda t: t, lambda t: names[t]):
        tree = PrefixTree.from_sequences([[relabel(t) for t in s] for s in batch])
        # one node a block: packing, too, may break ties by order
        schedule = build_schedule(
            tree,
            block_tokens,
            retain_tokens,
            fragments="node",
            needed=every_token(tree),
        )
        counts.add(
            (
                schedule.num_recomputed_tokens,
                schedule.peak_graph_tokens,
                schedule.peak_kv_tokens,
                schedule.num_blocks,
            )
        )
    assert len(counts) == 1
