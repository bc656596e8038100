import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.schedule import NeededOutputs, build_schedule, cut_tree
from areal_dta.tree import PrefixTree
from tests.builders import batches, make_tree


def masks(*words: str) -> list[np.ndarray]:
    return [np.array([c == "x" for c in word], dtype=bool) for word in words]


def test_tokens_below_the_last_read_position_are_not_computed():
    tree = make_tree("abcdef")
    needed = NeededOutputs.logprobs_at(
        tree, masks("..x..")
    )  # the logprob of d, read at c
    assert needed.computed == (3,)
    assert np.flatnonzero(needed.edge_T).tolist() == [3]
    assert np.flatnonzero(needed.output_T).tolist() == [2]


def test_a_fork_is_a_row_when_one_of_its_children_is_read():
    tree = make_tree("abc", "abd")
    needed = NeededOutputs.logprobs_at(tree, masks("..", ".x"))
    assert needed.computed == (2, 0, 0)  # d itself need not be computed
    assert np.flatnonzero(needed.edge_T).tolist() == [3]
    assert np.flatnonzero(needed.output_T).tolist() == [1]


def test_all_reads_everything_but_the_leaves():
    tree = make_tree("abc", "abd", "x")
    needed = NeededOutputs.all(tree)
    assert needed.computed == (2, 0, 0, 0)
    assert np.flatnonzero(needed.edge_T).tolist() == [1, 2, 3]
    cut = cut_tree(tree, 8, needed)
    assert cut.fragments[0].sequences == (0, 1) and cut.unread_sequences == (2,)


def test_nothing_read_computes_nothing():
    tree = make_tree("abc", "abd")
    needed = NeededOutputs.logprobs_at(tree, masks("..", ".."))
    schedule = build_schedule(tree, 4, None, True, needed)
    assert schedule.num_blocks == needed.num_computed_tokens == 0
    assert schedule.cut.unread_sequences == (0, 1)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (masks(".."), "1 masks for 2 sequences"),
        (masks("..", "..."), r"positions\[1\] has shape \(3,\); expected \(2,\)"),
    ],
)
def test_wrong_masks_are_named(positions, message):
    with pytest.raises(ValueError, match=message):
        NeededOutputs.logprobs_at(make_tree("abc", "abd"), positions)


@settings(max_examples=200, deadline=None)
@given(batches(8, 8), st.randoms(use_true_random=False))
def test_computed_are_exactly_the_ancestors_of_what_is_read(batch, random):
    tree = PrefixTree.from_sequences(batch)
    positions = [
        np.array([random.random() < 0.2 for _ in s[1:]], dtype=bool) for s in batch
    ]
    needed = NeededOutputs.logprobs_at(tree, positions)
    computed = set()
    edges = set()
    for sequence, mask in zip(batch, positions, strict=True):
        for t in np.flatnonzero(mask):
            edges.add(tuple(sequence[: t + 2]))
            computed |= {tuple(sequence[: k + 1]) for k in range(t + 1)}
    assert needed.num_computed_tokens == len(computed)
    assert int(needed.edge_T.sum()) == len(edges)
    assert needed.num_outputs == len({edge[:-1] for edge in edges})
