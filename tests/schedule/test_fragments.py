import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.schedule import NeededOutputs, cut_tree
from areal_dta.tree import PrefixTree
from tests.builders import batches, every_token, make_tree


def check_cut(cut, tree):
    """Assert every invariant of ``fragments``."""
    covered = sum(s.num_tokens for s in cut.segments)
    assert covered == cut.needed.num_computed_tokens
    assert [s.index for s in cut.segments] == list(range(len(cut.segments)))
    next_token = 0
    for s in cut.segments:
        assert s.num_tokens > 0 and s.first_token >= next_token
        next_token = s.first_token + s.num_tokens
        node = tree.nodes[s.node]
        assert s.first_token - node.first_token == s.start - node.start
        if s.parent >= 0:
            above = cut.segments[s.parent]
            assert above.index < s.index and above.end == s.start
            nodes = tree.nodes
            assert above.node == s.node or above.node == nodes[s.node].parent
        else:
            assert s.start == 0
    seen = []
    ending = list(cut.unread_sequences)
    for i, f in enumerate(cut.fragments):
        members = f.segments
        assert f.index == i and list(members) == sorted(members)
        assert f.num_tokens == sum(cut.segments[m].num_tokens for m in members)
        assert 0 < f.num_tokens <= cut.block_tokens
        assert f.parent < i
        for m in members:
            assert cut.segments[m].fragment == i
            parent = cut.segments[m].parent
            assert parent in members or parent == f.attach
        if f.parent >= 0:
            assert f.attach in cut.fragments[f.parent].trunk
            assert i in cut.fragments[f.parent].children
        seen += f.segments
        ending += f.sequences
    assert sorted(seen) == list(range(len(cut.segments)))
    assert sorted(ending) == list(range(tree.num_sequences))


def pieces(tree, block_tokens):
    """Each fragment as the texts of its segments."""
    cut = cut_tree(tree, block_tokens, every_token(tree))
    check_cut(cut, tree)
    out = []
    for f in cut.fragments:
        texts = []
        for s in (cut.segments[i] for i in f.segments):
            node = tree.nodes[s.node]
            letters = node.tokens[s.start - node.start : s.end - node.start]
            texts.append("".join(map(chr, letters)))
        out.append(texts)
    return out


def test_whole_tree_in_one_block():
    assert pieces(make_tree("abx", "aby", "c"), 8) == [["ab", "x", "y", "c"]]


def test_long_node_is_chopped_from_its_lower_end():
    assert pieces(make_tree("abcdefgh"), 3) == [["ab"], ["cde"], ["fgh"]]


def test_children_are_kept_with_the_tail_of_a_chopped_node():
    assert pieces(make_tree("abcdex", "abcdey"), 4) == [["abc"], ["de", "x", "y"]]


def test_siblings_that_do_not_fit_are_packed_together():
    tree = make_tree("axxx", "ayyy", "azzz", "awww")
    assert pieces(tree, 6) == [["a"], ["www", "xxx"], ["yyy", "zzz"]]
    cut = cut_tree(tree, 6, every_token(tree))
    assert [f.attach for f in cut.fragments] == [-1, 0, 0]
    assert cut.fragments[0].trunk == (0,) and cut.fragments[0].children == (1, 2)
    assert [f.path_tokens for f in cut.fragments] == [0, 1, 1]


def test_unrelated_roots_share_a_block():
    assert pieces(make_tree("ab", "cd", "ef"), 4) == [["ab", "cd"], ["ef"]]


def test_empty_tree_has_no_fragment():
    assert cut_tree(PrefixTree(), 4).fragments == ()


def test_block_tokens_of_zero_is_refused():
    with pytest.raises(ValueError, match="block_tokens=0"):
        cut_tree(make_tree("a"), 0)


@settings(max_examples=200, deadline=None)
@given(batches(10, 12), st.integers(1, 12), st.data())
def test_invariants_hold_on_random_trees(batch, block_tokens, data):
    tree = PrefixTree.from_sequences(batch)
    masks = [
        np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
        for n in (len(s) - 1 for s in batch)
    ]
    needed = data.draw(
        st.sampled_from(
            [
                every_token(tree),
                NeededOutputs.all(tree),
                NeededOutputs.logprobs_at(tree, masks),
            ]
        )
    )
    cut = cut_tree(tree, block_tokens, needed)
    check_cut(cut, tree)
    for f in cut.fragments:
        for child in f.children:
            below = cut.fragments[child]
            chain = cut.chain(below.attach, f.index)
            tokens = sum(cut.segments[s].num_tokens for s in chain)
            assert f.path_tokens + tokens == below.path_tokens
            assert set(chain) <= set(f.trunk)


def fewest_fragments(tree: PrefixTree, block_tokens: int) -> int:
    """Brute force over all ways to cut the edges between tokens."""
    parent = []
    for node in tree.nodes:
        for k in range(node.num_tokens):
            above = tree.nodes[node.parent] if node.parent >= 0 else None
            first = -1 if above is None else above.first_token + above.num_tokens - 1
            parent.append(node.first_token + k - 1 if k else first)
    inner = [t for t, p in enumerate(parent) if p >= 0]
    best = len(parent)
    for cuts in itertools.product((False, True), repeat=len(inner)):
        is_top = dict(zip(inner, cuts, strict=True))
        top = []
        for t, p in enumerate(parent):
            top.append(t if is_top.get(t, True) else top[p])
        sizes = {t: top.count(t) for t in set(top)}
        if max(sizes.values()) > block_tokens:
            continue
        hanging: dict[int, list[int]] = {}
        for t, size in sizes.items():
            hanging.setdefault(parent[t], []).append(size)
        best = min(best, sum(fewest_bins(s, block_tokens) for s in hanging.values()))
    return best


def fewest_bins(sizes: list[int], room: int) -> int:
    def place(i: int, bins: list[int]) -> int:
        if i == len(sizes):
            return len(bins)
        options = [
            place(i + 1, [*bins[:b], free - sizes[i], *bins[b + 1 :]])
            for b, free in enumerate(bins)
            if free >= sizes[i]
        ]
        return min([*options, place(i + 1, [*bins, room - sizes[i]])])

    return place(0, [])


@settings(max_examples=60, deadline=None)
@given(batches(4, 4), st.integers(1, 5))
def test_at_most_one_fragment_more_than_brute_force(batch, block_tokens):
    tree = PrefixTree.from_sequences(batch)
    if 0 < tree.num_tree_tokens <= 10:
        found = len(cut_tree(tree, block_tokens, every_token(tree)).fragments)
        assert found <= fewest_fragments(tree, block_tokens) + 1
