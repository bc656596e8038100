import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.tree import PrefixTree
from tests.builders import batches, make_tree


def text(tree: PrefixTree) -> list[str]:
    return ["".join(map(chr, node.tokens)) for node in tree.nodes]


def check_tree(tree):
    """Assert every invariant of ``prefix_tree``."""
    nodes = tree.nodes
    assert sum(n.num_tokens for n in nodes) == tree.num_tree_tokens
    assert sum(len(n.sequences) for n in nodes) == tree.num_sequences
    for i, node in enumerate(nodes):
        assert node.index == i and node.num_tokens > 0
        assert len(node.children) > 1 or node.sequences, f"node {i} is no fork"
        first = [int(nodes[c].tokens[0]) for c in node.children]
        assert first == sorted(set(first)), f"children of node {i}: {first}"
        assert all(nodes[c].parent == i for c in node.children)
        assert all(nodes[c].start == node.end for c in node.children)
        if node.parent < 0:
            assert node.start == 0
        else:
            assert node.parent < i and i in nodes[node.parent].children
    roots = [int(n.tokens[0]) for n in nodes if n.parent < 0]
    assert roots == sorted(set(roots))
    total = 0
    for s in range(tree.num_sequences):
        tokens = tree.sequence(s)
        assert len(tokens) == tree.sequence_length(s)
        assert s in nodes[tree.path(s)[-1]].sequences
        total += len(tokens)
    assert total == tree.num_sequence_tokens


def test_nodes_paths_and_counts():
    tree = make_tree("abd", "ab", "ac", "abd", "x")
    assert text(tree) == ["a", "b", "d", "c", "x"]
    assert [n.parent for n in tree.nodes] == [-1, 0, 1, 0, -1]
    assert [n.start for n in tree.nodes] == [0, 1, 2, 1, 0]
    assert [n.children for n in tree.nodes] == [(1, 3), (2,), (), (), ()]
    assert [n.sequences for n in tree.nodes] == [(), (1,), (0, 3), (2,), (4,)]
    assert [tree.path(i) for i in range(5)] == [
        [0, 1, 2],
        [0, 1],
        [0, 3],
        [0, 1, 2],
        [4],
    ]
    assert (tree.num_sequences, tree.num_sequence_tokens) == (5, 11)
    assert tree.num_tree_tokens == 5
    assert tree.sharing_ratio == 11 / 5
    assert tree.max_depth == 3
    assert tree.token_indices(2).tolist() == [0, 3]
    check_tree(tree)


def test_long_run_is_one_node():
    tree = make_tree("hello world", "hello there")
    assert text(tree) == ["hello ", "there", "world"]


def test_empty_list_is_an_empty_tree():
    tree = PrefixTree.from_sequences([])
    assert (tree.num_sequences, tree.num_tree_tokens, tree.nodes) == (0, 0, ())
    assert tree.sharing_ratio == 1.0 and tree.max_depth == 0
    check_tree(tree)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "sequence 1 is empty"),
        ([[1, 2]], "sequence 1 has shape"),
        ([0.5], "sequence 1 has dtype float64"),
        ([3, -2], "sequence 1 holds token id -2"),
    ],
)
def test_bad_sequences_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        PrefixTree.from_sequences([[1], bad])
    tree = make_tree("a")
    with pytest.raises(ValueError, match=message):
        tree.insert(bad)
    check_tree(tree)
    assert tree.num_sequences == 1


def test_caller_may_reuse_its_buffer():
    buffer = np.array([1, 2, 3], dtype=np.int32)
    tree = PrefixTree.from_sequences([buffer])
    buffer[:] = 9
    assert tree.sequence(0).tolist() == [1, 2, 3]


@settings(max_examples=200, deadline=None)
@given(batches(14, 9), st.randoms(use_true_random=False))
def test_batch_and_incremental_builds_agree_in_any_order(batch, random):
    tree = PrefixTree.from_sequences(batch)
    check_tree(tree)
    assert [tree.sequence(i).tolist() for i in range(len(batch))] == batch
    prefixes = {tuple(s[: k + 1]) for s in batch for k in range(len(s))}
    assert tree.num_tree_tokens == len(prefixes)

    order = list(range(len(batch)))
    random.shuffle(order)
    grown = PrefixTree()
    for i in order:
        grown.insert(batch[i])
    check_tree(grown)
    assert text(grown) == text(tree)
    assert [grown.path(k) for k in range(len(batch))] == [tree.path(i) for i in order]


def test_insertion_after_the_view_was_made():
    tree = make_tree("abc")
    assert text(tree) == ["abc"]
    assert tree.insert([ord("a"), ord("z")]) == 1
    assert text(tree) == ["a", "bc", "z"]
    check_tree(tree)


def test_large_ids_sort_by_value_not_by_byte():
    tree = PrefixTree.from_sequences([[256, 1], [1, 7], [2**40, 3], [256, 2]])
    assert [int(n.tokens[0]) for n in tree.nodes] == [1, 256, 1, 2, 2**40]
    check_tree(tree)


def test_deep_chain_of_prefixes_needs_no_recursion():
    tokens = np.arange(5000)
    tree = PrefixTree.from_sequences([tokens[: i + 1] for i in range(0, 5000, 2)])
    assert len(tree.nodes) == 2500 and tree.num_tree_tokens == 4999
