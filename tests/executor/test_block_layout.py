"""Tiles and levels cover exactly what a block's tokens see of one another."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.executor.layout.block_layout import BlockShape


@st.composite
def shapes(draw, max_tokens: int = 90) -> tuple[list[int], list[int]]:
    """Lengths and parents of segments in depth-first order."""
    num_segments = draw(st.integers(1, 9))
    lengths = draw(
        st.lists(
            st.integers(1, max_tokens), min_size=num_segments, max_size=num_segments
        )
    )
    parents, path = [], []
    for i in range(num_segments):
        depth = draw(st.integers(0, len(path)))
        path = path[:depth]
        parents.append(path[-1] if path else -1)
        path.append(i)
    return lengths, parents


def visible_by_definition(lengths: list[int], parents: list[int]) -> np.ndarray:
    """A token sees itself, what comes before it in its segment, and all ancestors."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    visible = np.zeros((starts[-1], starts[-1]), bool)
    for i, parent in enumerate(parents):
        rows = slice(starts[i], starts[i + 1])
        visible[rows, rows] = np.tri(lengths[i], dtype=bool)
        while parent >= 0:
            visible[rows, starts[parent] : starts[parent + 1]] = True
            parent = parents[parent]
    return visible


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_all_forms_agree_with_the_definition(shape):
    lengths, parents = shape
    expected = visible_by_definition(lengths, parents)
    block = BlockShape(lengths, parents)
    np.testing.assert_array_equal(block.visible, expected)

    at = 0
    from_tiles = np.zeros_like(expected)
    for tile in block.tiles:
        start, end = tile.queries
        assert start == at < end  # each query in one tile, in order
        at = end
        keys = np.concatenate([np.arange(*r) for r in tile.keys])
        assert len(set(keys)) == len(keys)
        shown = np.ones((end - start, len(keys)), bool)
        shown = shown if tile.visible_QT is None else tile.visible_QT
        from_tiles[start:end, keys] = shown
    assert at == block.num_tokens
    np.testing.assert_array_equal(from_tiles, expected)

    count = np.zeros(expected.shape, int)
    for start, end in block.run_ranges:
        count[start:end, start:end] += np.tri(end - start, dtype=int)
    for level in block.levels:
        for rows, columns in zip(level.queries, level.keys, strict=True):
            count[slice(*rows), slice(*columns)] += 1
    np.testing.assert_array_equal(count, expected)


def test_segments_without_a_branch_are_one_run():
    assert BlockShape([3, 4, 5], [-1, 0, 1]).is_chain
    assert BlockShape([3, 4, 5], [-1, 0, 1]).run_ranges == ((0, 12),)
    assert not BlockShape([3, 4, 5], [-1, 0, 0]).is_chain
    assert BlockShape([3, 4, 5], [-1, 0, 0]).run_ranges == ((0, 3), (3, 7), (7, 12))
    assert not BlockShape([3, 4], [-1, -1]).is_chain


def test_levels_are_one_call_per_depth():
    #      0           5
    #    1   4         6
    #   2 3
    shape = BlockShape([2, 3, 1, 1, 4, 6, 2], [-1, 0, 1, 1, 0, -1, 5])
    queries = [level.queries for level in shape.levels]
    keys = [level.keys for level in shape.levels]
    assert queries == [((2, 11),), ((5, 7),)]  # 5 and 6 are one run
    assert keys == [((0, 2),), ((2, 5),)]


def pairs(shape: BlockShape) -> int:
    """Query-key pairs that a kernel computes."""
    return sum(
        (tile.queries[1] - tile.queries[0])
        * sum(end - start for start, end in tile.keys)
        for tile in shape.tiles
    )


def test_tiles_leave_out_most_of_what_is_hidden():
    chain = BlockShape([512], [-1])
    assert pairs(chain) <= 0.65 * 512**2  # 0.5 is visible
    unrelated = BlockShape([64] * 8, [-1] * 8)
    assert pairs(unrelated) <= 8 * (64 * 64 + 64 * 64)
    answers = BlockShape([128, *[192] * 2], [-1, 0, 0])
    visible = int(answers.visible.sum())
    assert pairs(answers) <= 1.6 * visible
    # so short that one call for all is the cheapest
    assert len(BlockShape([8] * 6, [-1, 0, 0, 0, 0, 0]).tiles) == 1
