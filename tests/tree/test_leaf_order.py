import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_dta.tree import LeafOrder, PrefixTree
from areal_dta.tree.leaf_order import range_min
from tests.builders import batches, leaf_order, make_tree


def same(a: LeafOrder, b: LeafOrder) -> bool:
    return (
        a.sequence_N.tolist() == b.sequence_N.tolist()
        and a.length_N.tolist() == b.length_N.tolist()
        and a.lcp_N.tolist() == b.lcp_N.tolist()
    )


def test_by_hand():
    order = LeafOrder.from_tree(make_tree("abd", "ac", "ab", "x", "abc", "ab"))
    assert order.sequence_N.tolist() == [2, 5, 4, 0, 1, 3]
    assert order.length_N.tolist() == [2, 2, 3, 3, 2, 1]
    assert order.lcp_N.tolist() == [0, 2, 2, 2, 1, 0]
    assert order.num_tree_tokens == 6 and order.num_sequence_tokens == 13


def test_only_what_is_read_counts():
    # "abcd" is read up to "a", so "abce" pays for "abce" alone
    tree = make_tree("abcd", "abce", "xy")
    order = LeafOrder.from_tree(tree, lengths=[1, 4, 0])
    assert order.sequence_N.tolist() == [2, 0, 1]
    assert order.length_N.tolist() == [0, 1, 4]
    assert order.lcp_N.tolist() == [0, 0, 1]


def test_equal_sequences_keep_their_order():
    order = leaf_order([[1], [1], [0]])
    assert order.sequence_N.tolist() == [2, 0, 1]
    tree = PrefixTree.from_sequences([[1], [1], [0]])
    assert same(order, LeafOrder.from_tree(tree))


@given(batches())
def test_with_and_without_a_tree(batch):
    tree = PrefixTree.from_sequences(batch)
    order = LeafOrder.from_tree(tree)
    assert same(order, leaf_order(batch))
    assert order.num_tree_tokens == tree.num_tree_tokens
    assert order.num_sequence_tokens == tree.num_sequence_tokens


@given(batches(), st.data())
def test_cut_sequences_are_ordered_as_if_built_anew(batch, data):
    lengths = [data.draw(st.integers(0, len(s))) for s in batch]
    order = LeafOrder.from_tree(PrefixTree.from_sequences(batch), lengths)
    cut = [s[:n] for s, n in zip(batch, lengths, strict=True)]
    read = PrefixTree.from_sequences([s for s in cut if s])
    assert order.num_tree_tokens == read.num_tree_tokens
    for left, right in zip(range(len(batch)), range(1, len(batch)), strict=False):
        a, b = (cut[order.sequence_N[i]] for i in (left, right))
        common = [x == y for x, y in zip(a, b, strict=False)]
        assert order.lcp_N[right] == (common + [False]).index(False)


@given(batches(), st.data())
def test_subsets_and_groups_know_their_common_prefixes(batch, data):
    order = leaf_order(batch)
    label = [data.draw(st.integers(0, 2)) for _ in batch]
    positions, grouped = order.grouped(np.array(label, np.int64))
    assert sorted(positions.tolist()) == list(range(len(batch)))
    total = 0
    for value in range(3):
        chosen = np.flatnonzero(np.array(label) == value)
        subset = order.subset(chosen)
        tree = PrefixTree.from_sequences([batch[i] for i in subset.sequence_N])
        assert subset.num_tree_tokens == tree.num_tree_tokens
        total += tree.num_tree_tokens
    assert grouped.num_tree_tokens == total


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_range_min(values, data):
    n = len(values)
    ranges = [
        sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
        for _ in range(5)
    ]
    ranges = [(a, b) for a, b in ranges if a < b]
    start = np.array([a for a, _ in ranges], np.int64)
    end = np.array([b for _, b in ranges], np.int64)
    expected = [min(values[a:b]) for a, b in ranges]
    assert range_min(np.array(values), start, end).tolist() == expected


@pytest.mark.parametrize(
    ("lengths", "lcps"), [([3], [1]), ([3, 2], [0, 3]), ([3], [0, 0]), ([3], [-1])]
)
def test_arrays_that_do_not_fit_are_refused(lengths, lcps):
    with pytest.raises(ValueError, match="expected"):
        LeafOrder.from_arrays(lengths, lcps)


def test_bad_arguments_name_the_sequence():
    tree = make_tree("ab", "c")
    with pytest.raises(ValueError, match=r"lengths\[1\]=2; expected 0 to 1"):
        LeafOrder.from_tree(tree, lengths=[1, 2])
    with pytest.raises(ValueError, match=r"lengths has shape \(1,\); expected \(2,\)"):
        LeafOrder.from_tree(tree, lengths=[1])
