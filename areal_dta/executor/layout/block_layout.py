"""Where everything of a block lies: positions, rows, edges, and who sees whom.

A block holds segments in depth-first order, so a segment's descendants follow it in one
piece: a query sees a key iff the key comes first and the query lies before the end of
the key's subtree. From that follow the three forms that kernels want, none of them a
matrix until somebody needs one:

  * ``visible``: the whole matrix, for masked softmax;
  * ``tiles``: few calls over little more than the visible pairs, for kernels that
    compute what a mask hides (CPU flash does, even under ``is_causal``);
  * ``levels``: no mask at all, for kernels with variable lengths: each run with
    itself, and the descendants of a run with the run, one call per depth.

All three agree with the definition, and tiles waste little: test_block_layout.py.
"""

# S = block tokens, Q = queries of a tile, T = its keys
# R = rows (positions with a needed output), E = edges (labels)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from areal_dta.executor.states.run_tree import RunTree
from areal_dta.schedule import Fragment, Fragmentation, Segment
from areal_dta.tree import PrefixTree

Range = tuple[int, int]

_ATOM_TOKENS = 64
_CALL_PAIRS = 4096
"""Cost of one more call in query-key pairs: 64 x 64, measured on a CPU."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Neighbouring queries and the keys that any of them sees."""

    queries: Range
    keys: tuple[Range, ...]
    visible_QT: np.ndarray | None
    """bool over the concatenated ``keys``; None: every query sees every key."""


@dataclass(frozen=True, slots=True)
class Level:
    """Disjoint pairs of ranges; all queries of a pair see all its keys."""

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive segments without a branch between them."""

    start: int
    end: int
    last: int
    """Exclusive end of this run's subtree."""
    parent: int


class BlockShape:
    """Which tokens of a block see which, from its segments.

    Args:
        lengths: tokens of each segment, in depth-first order, each at least 1.
        parents: for each the index of the segment above it, -1 if that lies outside.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int]) -> None:
        self.num_tokens = sum(lengths)
        self._runs = _runs(lengths, parents)
        self.is_chain = len(self._runs) == 1

    @cached_property
    def last_S(self) -> np.ndarray:
        """Exclusive end of each token's subtree."""
        last = np.empty(self.num_tokens, np.int64)
        for run in self._runs:
            last[run.start : run.end] = run.last
        return last

    @cached_property
    def visible(self) -> np.ndarray:
        """bool [S, S], True where the row sees the column."""
        return self._visible((0, self.num_tokens), [(0, self.num_tokens)])

    @cached_property
    def run_ranges(self) -> tuple[Range, ...]:
        """Runs, each causal within itself; together they cover the block."""
        return tuple((run.start, run.end) for run in self._runs)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """What is visible beyond the runs themselves, one level per depth."""
        depth: list[int] = []
        by_depth: dict[int, list[_Run]] = {}
        for run in self._runs:
            depth.append(depth[run.parent] + 1 if run.parent >= 0 else 0)
            if run.last > run.end:  # it has descendants
                by_depth.setdefault(depth[-1], []).append(run)
        return tuple(
            Level(
                queries=tuple((run.end, run.last) for run in by_depth[d]),
                keys=tuple((run.start, run.end) for run in by_depth[d]),
            )
            for d in sorted(by_depth)
        )

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Queries in order, each in one tile.

        Greedy: a tile takes in the next few queries while the pairs that this adds
        cost less than another call.
        """
        chosen: list[tuple[Range, list[Range]]] = []
        for queries, keys in self._atoms():
            if chosen:
                (start, end), before = chosen[-1]
                both = _union([*before, *keys])
                merged = (queries[1] - start) * _num_tokens(both)
                apart = (end - start) * _num_tokens(before) + _CALL_PAIRS
                apart += (queries[1] - queries[0]) * _num_tokens(keys)
                if merged <= apart:
                    chosen[-1] = (start, queries[1]), both
                    continue
            chosen.append((queries, keys))
        return tuple(self._tile(queries, keys) for queries, keys in chosen)

    def _atoms(self) -> Iterable[tuple[Range, list[Range]]]:
        """Yield small pieces of runs with the keys that their queries see."""
        above: list[list[Range]] = []  # per run: itself and its ancestors
        for run in self._runs:
            ancestors = above[run.parent] if run.parent >= 0 else []
            above.append(_union([*ancestors, (run.start, run.end)]))
            for start in range(run.start, run.end, _ATOM_TOKENS):
                end = min(start + _ATOM_TOKENS, run.end)
                yield (start, end), _union([*ancestors, (run.start, end)])

    def _tile(self, queries: Range, keys: list[Range]) -> Tile:
        visible = self._visible(queries, keys)
        return Tile(queries, tuple(keys), None if visible.all() else visible)

    def _visible(self, queries: Range, keys: Iterable[Range]) -> np.ndarray:
        at_Q1 = np.arange(*queries)[:, None]
        at_T = np.concatenate([np.arange(*r) for r in keys])
        result: np.ndarray = (at_T <= at_Q1) & (at_Q1 < self.last_S[at_T])
        return result


def _runs(lengths: Sequence[int], parents: Sequence[int]) -> list[_Run]:
    num_children = [0] * len(lengths)
    for parent in parents:
        if parent >= 0:
            num_children[parent] += 1
    # A segment extends the run above it if it is an only child; else it starts one.
    bounds: list[list[int]] = []  # start, end, parent run
    run_of: list[int] = []
    end = 0
    for i, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        assert length > 0 and parent < i
        start, end = end, end + length
        if parent >= 0 and parent == i - 1 and num_children[parent] == 1:
            run_of.append(run_of[parent])
            bounds[run_of[-1]][1] = end
        else:
            run_of.append(len(bounds))
            bounds.append([start, end, run_of[parent] if parent >= 0 else -1])
    # The end of a run's subtree, from the bottom up: children follow their parent.
    last = [b[1] for b in bounds]
    for i in range(len(bounds) - 1, -1, -1):
        if (parent := bounds[i][2]) >= 0:
            last[parent] = max(last[parent], last[i])
    return [_Run(s, e, at, p) for (s, e, p), at in zip(bounds, last, strict=True)]


def _num_tokens(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _union(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges sorted and disjoint, neighbours joined."""
    result: list[Range] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


@dataclass(frozen=True, slots=True)
class TreeTokens:
    """A cut tree and its tokens in depth-first order."""

    tree: PrefixTree
    cut: Fragmentation
    tokens: np.ndarray
    """[tree tokens], int64."""

    @classmethod
    def of(cls, tree: PrefixTree, cut: Fragmentation) -> TreeTokens:
        tokens = np.concatenate(
            [node.tokens for node in tree.nodes] or [np.empty(0, np.int64)]
        )
        return cls(tree, cut, tokens)

    def next_tokens(self, segment: Segment) -> list[int]:
        """Return the tree tokens that may follow a segment's last one."""
        node = self.tree.nodes[segment.node]
        if segment.end < node.end:
            return [segment.first_token + segment.num_tokens]
        return [self.tree.nodes[c].first_token for c in node.children]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Positions, rows and edges of a block. Index arrays are int64, on the host."""

    offsets: dict[int, int]
    """Segment -> its first position in the block."""
    token_S: np.ndarray
    """Tree token index of each position."""
    depth_S: np.ndarray
    row_R: np.ndarray
    """Positions with a needed output."""
    edge_row_E: np.ndarray
    """Which of the rows predicts the edge's token; ascending."""
    edge_token_E: np.ndarray
    """Tree token index of the predicted token, which identifies the edge."""
    shape: BlockShape
    """Which tokens see which."""
    runs: RunTree | None = None
    """Where states go; None for a model without any."""

    @property
    def depths(self) -> Range:
        """The lowest and the highest depth."""
        return int(self.depth_S.min()), int(self.depth_S.max())

    def arrays(self, tree: TreeTokens) -> dict[str, np.ndarray]:
        """Return the index arrays that a run reads on the device, by name."""
        return {
            "input": tree.tokens[self.token_S],
            "token": self.token_S,
            "depth": self.depth_S,
            "row": self.row_R,
            "row_token": self.token_S[self.row_R],
            "edge_row": self.edge_row_E,
            "edge_token": self.edge_token_E,
            "label": tree.tokens[self.edge_token_E],
        }


def lay_out(
    tree: TreeTokens, segments: Sequence[int], exits: Sequence[int] | None = None
) -> BlockLayout:
    """Lay segments out in the given order; parents must precede children.

    Args:
        exits: segments at whose ends states leave; None for a model without states.
    """
    all_segments, needed = tree.cut.segments, tree.cut.needed
    # Positions: segments end to end.
    offsets: dict[int, int] = {}
    size = 0
    for index in segments:
        offsets[index] = size
        size += all_segments[index].num_tokens

    # Tokens, depths and edges: to the next token, or at a segment's end to each child.
    token_S = np.empty(size, np.int64)
    depth_S = np.empty(size, np.int64)
    edge_position: list[np.ndarray] = []
    edge_token: list[np.ndarray] = []
    for index, offset in offsets.items():
        s = all_segments[index]
        end = offset + s.num_tokens
        token_S[offset:end] = np.arange(s.first_token, s.first_token + s.num_tokens)
        depth_S[offset:end] = np.arange(s.start, s.end)
        following = np.array(tree.next_tokens(s), np.int64)
        edge_position.append(np.arange(offset, end - 1))
        edge_position.append(np.full(len(following), end - 1, np.int64))
        edge_token += [token_S[offset + 1 : end], following]
    # Only needed outputs stay.
    position_E, token_E = np.concatenate(edge_position), np.concatenate(edge_token)
    is_needed = needed.edge_T[token_E]
    position_E, token_E = position_E[is_needed], token_E[is_needed]
    row_R = np.flatnonzero(needed.output_T[token_S])

    order = {index: i for i, index in enumerate(segments)}
    lengths = [all_segments[index].num_tokens for index in segments]
    parents = [order.get(all_segments[index].parent, -1) for index in segments]
    runs = None
    if exits is not None:
        runs = RunTree(lengths, parents, [order[index] for index in exits])
    return BlockLayout(
        offsets=offsets,
        token_S=token_S,
        depth_S=depth_S,
        row_R=row_R,
        edge_row_E=np.searchsorted(row_R, position_E),
        edge_token_E=token_E,
        shape=BlockShape(lengths, parents),
        runs=runs,
    )


def as_slice(index: np.ndarray) -> slice | None:
    """Return ascending indices without a gap as a slice; None if they are not."""
    if not len(index) or index[-1] - index[0] + 1 != len(index):
        return None
    return slice(int(index[0]), int(index[-1]) + 1)


def trunk_positions(
    cut: Fragmentation, fragment: Fragment, layout: BlockLayout
) -> np.ndarray:
    """Return where the trunk of a fragment lies in its block."""
    pieces = [
        layout.offsets[s] + np.arange(cut.segments[s].num_tokens)
        for s in fragment.trunk
    ]
    return np.concatenate(pieces)


def exit_segments(cut: Fragmentation, fragment: Fragment) -> list[int]:
    """Return the segments that children of a fragment continue, in order."""
    return sorted({cut.fragments[child].attach for child in fragment.children})


def path_positions(cut: Fragmentation, fragment: Fragment) -> np.ndarray:
    """Return where the path of a fragment lies in the trunk of its parent."""
    starts: dict[int, int] = {}
    size = 0
    for s in cut.fragments[fragment.parent].trunk:
        starts[s] = size
        size += cut.segments[s].num_tokens
    pieces = [
        starts[s] + np.arange(cut.segments[s].num_tokens)
        for s in cut.chain(fragment.attach, fragment.parent)
    ]
    return np.concatenate(pieces)
