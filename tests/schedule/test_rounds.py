"""Ranks in step: everybody's operations, in everybody's order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_dta.schedule import build_schedule, merge_rounds, operations
from tests.builders import make_tree

own_operations = st.lists(
    st.sampled_from(["F", "FB", "B"]), max_size=12
).map("".join)  # fmt: skip


@given(st.lists(own_operations, min_size=1, max_size=4))
def test_each_rank_gets_its_operations_in_its_order(of_rank):
    rounds = merge_rounds(of_rank)
    for rank, own in enumerate(of_rank):
        assert "".join(r.kind for r in rounds if rank in r.ranks) == own
    assert all(r.ranks for r in rounds)
    longest = max(map(len, of_rank))
    assert longest <= len(rounds) <= sum(map(len, of_rank))


@pytest.mark.parametrize("of_rank, expected", [
    ([], ""),
    (["", ""], ""),
    (["FFBB", "FFBB"], "FFBB"),
    (["FBFBFB", ""], "FBFBFB"),
    (["FFFBBB", "FB"], "FFFBBB"),
    (["FFBB", "FBFB"], "FFBFB"),
])  # fmt: skip
def test_by_hand(of_rank, expected):
    assert "".join(r.kind for r in merge_rounds(of_rank)) == expected


def test_operations_of_a_schedule():
    tree = make_tree("abcd", "abxy")
    retained = build_schedule(tree, block_tokens=2, retain_tokens=None)
    again = build_schedule(tree, block_tokens=2, retain_tokens=0)
    forward = build_schedule(tree, block_tokens=2, training=False)
    # the trunk is entered, two leaves do both, the trunk is left
    trunk_and_leaves = ("F", "FB" * (len(retained.cut.fragments) - 1))
    assert operations(retained) == "".join(trunk_and_leaves) + "B"
    assert operations(again) == "".join(trunk_and_leaves) + "FB"
    assert operations(forward) == "F" * len(forward.cut.fragments)
    assert operations(build_schedule(make_tree(), block_tokens=2)) == ""
