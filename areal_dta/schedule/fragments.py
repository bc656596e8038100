"""Cut the computed part of a prefix tree into fragments of at most ``block_tokens``.

A fragment is what one call of the model computes: pieces of the tree that all continue
the same token, or none. Few and full fragments are fast: each call pays kernel launches
and one pass over all parameter gradients.

Method: bottom-up greedy tree partition at token granularity. A node keeps the smallest
open pieces of its children that fit, and closes the rest, packed together by best-fit
decreasing since they continue the same token. A node longer than the room left is
chopped from its lower end. How many pieces to keep is chosen among a few numbers:
fewest closed fragments first, then the smallest open piece. Packing makes this a
heuristic; tests/schedule/test_fragments.py compares it with brute force.

Invariants (``check_cut`` in tests/schedule/test_fragments.py):
  * every computed token lies in exactly one segment, every segment in one fragment;
  * no fragment holds more than ``block_tokens`` tokens;
  * pieces of a fragment whose parents lie outside continue the same segment end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from areal_dta.schedule.needed_outputs import NeededOutputs
from areal_dta.tree import PrefixTree

# (node, start, end): tokens of a node at depth [start, end)
_Piece = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Run of tokens of one node, at depth ``[start, end)`` of its paths."""

    index: int
    """Position in depth-first order over the whole tree."""
    node: int
    start: int
    end: int
    first_token: int
    """Index of the first token among all tree tokens in depth-first order."""
    parent: int
    """The segment right above; -1 at the top of the tree."""
    fragment: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Fragment:
    """Segments that one model call computes, behind one path."""

    index: int
    """Position in the order of first entry."""
    segments: tuple[int, ...]
    """Segments in depth-first order, so a parent precedes its children."""
    trunk: tuple[int, ...]
    """Those of ``segments`` at or below which a child fragment attaches."""
    attach: int
    """The segment whose last token the fragment continues; -1 for none."""
    parent: int
    """The fragment of ``attach``; -1 for none."""
    children: tuple[int, ...]
    """Child fragments, grouped by the segment that they continue."""
    sequences: tuple[int, ...]
    """Sequences whose last computed token lies in the fragment."""
    num_tokens: int
    num_trunk_tokens: int
    path_tokens: int
    """Tokens above the fragment."""


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """A tree cut into fragments; ``fragments`` is in depth-first order."""

    block_tokens: int
    needed: NeededOutputs
    segments: tuple[Segment, ...]
    fragments: tuple[Fragment, ...]
    unread_sequences: tuple[int, ...]
    """Sequences of which no token is computed."""

    def chain(self, segment: int, fragment: int) -> list[int]:
        """Return the segments of ``fragment`` from its top down to ``segment``."""
        chain = []
        while segment >= 0 and self.segments[segment].fragment == fragment:
            chain.append(segment)
            segment = self.segments[segment].parent
        return chain[::-1]


def cut_nodes(tree: PrefixTree, needed: NeededOutputs | None = None) -> Fragmentation:
    """Make every node a fragment, whatever its length: plain node-by-node traversal."""
    needed = needed or NeededOutputs.all(tree)
    pieces = [
        [(node.index, node.start, node.start + num_tokens)]
        for node, num_tokens in zip(tree.nodes, needed.computed, strict=True)
        if num_tokens
    ]
    longest = max(needed.computed, default=1)
    return _assemble(tree, max(1, longest), needed, pieces)


def cut_tree(
    tree: PrefixTree, block_tokens: int, needed: NeededOutputs | None = None
) -> Fragmentation:
    """Cut the computed part of a tree into fragments.

    Args:
        block_tokens: maximum number of tokens per fragment.
        needed: the outputs that the loss reads, by default all.

    Cost: O(nodes log nodes) as a rule, O(nodes x block_tokens) at worst.

    Raises:
        ValueError: ``block_tokens`` is below 1.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens}; expected at least 1")
    needed = needed or NeededOutputs.all(tree)
    closed = _close_pieces(tree, block_tokens, needed.computed)
    return _assemble(tree, block_tokens, needed, closed)


def _close_pieces(
    tree: PrefixTree, budget: int, computed: Sequence[int]
) -> list[list[_Piece]]:
    """Return the pieces of each fragment, in no particular order."""
    closed: list[list[_Piece]] = []
    open_pieces: dict[int, tuple[int, list[_Piece]]] = {}
    for node in reversed(tree.nodes):  # children before parents
        num_tokens = computed[node.index]
        if not num_tokens:
            continue
        # Keep some of the children's open pieces; the node joins them.
        below = [open_pieces.pop(c) for c in node.children if c in open_pieces]
        below.sort(key=lambda p: p[0])
        num_kept = _choose_kept([size for size, _ in below], num_tokens, budget)
        closed += _pack(below[num_kept:], budget)
        piece = [p for _, pieces in below[:num_kept] for p in pieces]
        size = sum(n for n, _ in below[:num_kept])
        end = node.start + num_tokens
        # Chop what does not fit from the lower end, where the kept pieces attach.
        while end - node.start > budget - size:
            start = end - (budget - size)
            closed.append([(node.index, start, end), *piece])
            piece, size, end = [], 0, start
        piece.append((node.index, node.start, end))
        open_pieces[node.index] = (size + end - node.start, piece)
    roots = [open_pieces[i] for i in sorted(open_pieces)]
    return closed + _pack(roots, budget)


def _choose_kept(sizes: list[int], num_tokens: int, budget: int) -> int:
    """Return how many open pieces of its children (smallest first) a node keeps."""
    # sums[k]: tokens of the first k; one token of the node has to fit beside them.
    sums = [0]
    for size in sizes:
        if sums[-1] + size > budget - 1:
            break
        sums.append(sums[-1] + size)
    num_fit = len(sums) - 1
    # Compare none, all that fit, and as many as need no further block.
    num_blocks = [-(-(num_tokens + kept) // budget) for kept in sums]
    cheap = max(k for k in range(num_fit + 1) if num_blocks[k] == num_blocks[0])
    best: tuple[int, int, int] | None = None
    for k in sorted({0, cheap, num_fit}, reverse=True):
        packed = len(_pack([(size, []) for size in sizes[k:]], budget))
        remainder = num_tokens + sums[k] - budget * (num_blocks[k] - 1)
        score = (packed + num_blocks[k], remainder, -k)
        best = score if best is None else min(best, score)
    assert best is not None
    return -best[2]


def _pack(pieces: list[tuple[int, list[_Piece]]], budget: int) -> list[list[_Piece]]:
    """Merge pieces into few fragments, best-fit decreasing."""
    bins: list[list[_Piece]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for size, members in sorted(pieces, key=lambda p: -p[0]):
        at = bisect_left(room, (size, -1))
        if at == len(room):
            bins.append(list(members))
            insort(room, (budget - size, len(bins) - 1))
        else:
            free, index = room.pop(at)
            bins[index] += members
            insort(room, (free - size, index))
    return bins


def _assemble(
    tree: PrefixTree,
    block_tokens: int,
    needed: NeededOutputs,
    closed: list[list[_Piece]],
) -> Fragmentation:
    """Number segments and fragments depth first and link them."""
    nodes = tree.nodes
    # Segments: the pieces in depth-first order, each below what ends where it starts.
    pieces = sorted((p, group) for group, ps in enumerate(closed) for p in ps)
    at_end = {(node, end): i for i, ((node, _, end), _) in enumerate(pieces)}
    parent_segment = []
    for (node, start, _), _ in pieces:
        above = node if start > nodes[node].start else nodes[node].parent
        parent_segment.append(-1 if above < 0 else at_end[above, start])

    # Link the groups of pieces: a group continues the segment above its first one.
    attach = [-1] * len(closed)
    children: list[list[int]] = [[] for _ in closed]
    members: list[list[int]] = [[] for _ in closed]
    for i, (_, group) in enumerate(pieces):
        parent = parent_segment[i]
        if not members[group] and parent >= 0:
            attach[group] = parent
            children[pieces[parent][1]].append(group)
        members[group].append(i)
    for below in children:
        below.sort(key=lambda g: (attach[g], members[g][0]))

    # Number the groups depth first.
    number: dict[int, int] = {}
    stack = [g for g in range(len(closed)) if attach[g] < 0]
    stack.sort(key=lambda g: members[g][0], reverse=True)
    while stack:
        g = stack.pop()
        number[g] = len(number)
        stack += reversed(children[g])

    segments = tuple(
        Segment(
            index=i,
            node=node,
            start=start,
            end=end,
            first_token=nodes[node].first_token + start - nodes[node].start,
            parent=parent_segment[i],
            fragment=number[group],
        )
        for i, ((node, start, end), group) in enumerate(pieces)
    )
    # Fragments, with their trunks: paths from the children's attachments to the top.
    ending, unread = _sequence_ends(tree, needed.computed, at_end)
    fragments = []
    for g in sorted(number, key=number.__getitem__):
        trunk: set[int] = set()
        for child in children[g]:
            s = attach[child]
            while s >= 0 and pieces[s][1] == g and s not in trunk:
                trunk.add(s)
                s = parent_segment[s]
        ends = [segments[s] for s in members[g]]
        fragments.append(
            Fragment(
                index=number[g],
                segments=tuple(members[g]),
                trunk=tuple(sorted(trunk)),
                attach=attach[g],
                parent=-1 if attach[g] < 0 else segments[attach[g]].fragment,
                children=tuple(number[c] for c in children[g]),
                sequences=tuple(i for s in members[g] for i in ending.get(s, ())),
                num_tokens=sum(s.num_tokens for s in ends),
                num_trunk_tokens=sum(segments[s].num_tokens for s in trunk),
                path_tokens=segments[members[g][0]].start,
            )
        )
    return Fragmentation(
        block_tokens, needed, segments, tuple(fragments), tuple(unread)
    )


def _sequence_ends(
    tree: PrefixTree, computed: Sequence[int], at_end: dict[tuple[int, int], int]
) -> tuple[dict[int, list[int]], list[int]]:
    """Return, per segment, the sequences whose last computed token is its last one; and
    the sequences of which no token is computed."""
    ending: dict[int, list[int]] = {}
    unread: list[int] = []
    for node in tree.nodes:
        above = node
        while not computed[above.index] and above.parent >= 0:
            above = tree.nodes[above.parent]
        if num_tokens := computed[above.index]:
            segment = at_end[above.index, above.start + num_tokens]
            ending.setdefault(segment, []).extend(node.sequences)
        else:
            unread.extend(node.sequences)
    return ending, unread
