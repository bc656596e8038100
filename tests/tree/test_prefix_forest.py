"""The forest of waiting sequences against a prefix tree of the same sequences."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.tree import PrefixTree
from areal_dta.tree.prefix_forest import PrefixForest
from tests.builders import leaf_order

SEQUENCES = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=12
)


def forest_of(sequences, owners=None):
    forest = PrefixForest()
    for i, sequence in enumerate(sequences):
        owner = (i, 0) if owners is None else owners[i]
        forest.insert(owner, np.array(sequence), np.arange(1, len(sequence)))
    return forest


def assert_same(forest, sequences):
    tree = PrefixTree.from_sequences(sequences)
    total = forest.total
    assert total.num_sequences == tree.num_sequences
    assert total.num_sequence_tokens == tree.num_sequence_tokens
    assert total.num_tree_tokens == tree.num_tree_tokens
    roots = {int(n.tokens[0]) for n in tree.nodes if n.parent < 0}
    assert set(forest.trees) == roots
    assert (
        sum(t.num_tree_tokens for t in forest.trees.values()) == total.num_tree_tokens
    )
    pairs = sum(n.num_tokens * (n.start + n.end + 1) // 2 for n in tree.nodes)
    assert total.num_pairs == pairs
    # every token but the first of its tree is somebody's needed output
    assert total.num_outputs == tree.num_tree_tokens - len(roots)


@given(SEQUENCES, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_inserting_and_removing_keep_the_counts_of_the_tree(sequences, rng):
    forest = forest_of(sequences)
    assert_same(forest, sequences)
    left = list(range(len(sequences)))
    rng.shuffle(left)
    while len(left) > 1:
        forest.remove((left.pop(), 0))
        assert_same(forest, [sequences[i] for i in left])
    forest.remove((left.pop(), 0))
    assert forest.total.num_sequences == 0 and forest.trees == {}


@given(SEQUENCES, st.data())
@settings(max_examples=100, deadline=None)
def test_the_order_of_some_groups_is_that_of_their_own_tree(sequences, data):
    forest = forest_of(sequences)
    numbers = st.sampled_from(range(len(sequences)))
    groups = sorted(data.draw(st.sets(numbers, min_size=1)))
    owners, order = forest.order(groups)
    chosen = [sequences[g] for g in groups]
    expected = leaf_order(chosen)
    assert [groups[i] for i in expected.sequence_N] == [g for g, _ in owners]
    assert order.length_N.tolist() == expected.length_N.tolist()
    assert order.lcp_N.tolist() == expected.lcp_N.tolist()
    own = forest_of(chosen).total
    assert forest.stats(owners, order) == own


def test_a_thousand_orders_of_arrival_give_one_forest():
    rng = random.Random(0)
    stem = [rng.randrange(50) for _ in range(40)]
    sequences = [
        stem[: rng.randrange(1, 40)] + [rng.randrange(50) for _ in range(6)]
        for _ in range(24)
    ]
    sequences += sequences[:3] + [sequences[4][:5]]  # duplicates and a prefix
    owners = [(i // 4, i % 4) for i in range(len(sequences))]
    first = None
    for seed in range(1000):
        arrival = list(range(len(sequences)))
        random.Random(seed).shuffle(arrival)
        forest = forest_of(
            [sequences[i] for i in arrival], [owners[i] for i in arrival]
        )
        places, order = forest.order(range(7))
        seen = places, order.length_N.tolist(), order.lcp_N.tolist(), forest.trees
        first = first or seen
        assert seen == first


def test_needed_outputs_stay_those_of_their_sequence():
    forest = PrefixForest()
    forest.insert((0, 0), np.array([7, 8, 9]), np.array([2]))
    forest.insert((0, 1), np.array([7, 8, 9]), np.array([1, 2]))
    assert [len(forest.leaf((0, b)).needed_outputs) for b in (0, 1)] == [1, 2]
    assert forest.total.num_outputs == 1  # of the first of equal sequences
