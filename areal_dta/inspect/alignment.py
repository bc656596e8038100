"""Where two continuations of one prefix agree again after they have parted.

A block is a run of equal tokens, one in each continuation. Blocks are found by hashes
of short runs, and the heaviest chain of blocks that rises in both is the alignment.
Where passages were moved, blocks lie outside every chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_dta.tree.prefix_tree import common_prefix

Ids = NDArray[np.int32]

_GRAM: Final = 6  # tokens that are hashed together: shorter blocks are not found
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_MAX_CANDIDATES: Final = 8  # places of one gram that are tried
_MAX_BLOCKS: Final = 256
_MIN_MOVED: Final = 8  # tokens of a region in which passages are seen to have moved
_MOVED_SHARE: Final = 0.2  # of such a region, that lies outside the widest chain


@dataclass(frozen=True, slots=True)
class Block:
    """Equal tokens: ``[a, a + length)`` of one, ``[b, b + length)`` of the other."""

    a: int
    b: int
    length: int


@dataclass(frozen=True, slots=True)
class Alignment:
    chain: tuple[Block, ...]
    """Blocks that rise in both: most tokens, less those of the gaps between. (Without
    the gaps, a reply would be aligned with a longer one that comes later.)"""
    widest: tuple[Block, ...]
    """Blocks that rise in both: most tokens, whatever lies between."""
    moved: tuple[Block, ...]
    """Blocks outside the widest chain."""


def align(a: Ids, b: Ids) -> Alignment:
    """Align two continuations that differ in their first token."""
    blocks = _blocks(a, b)
    widest = _heaviest_chain(blocks, 0)
    return Alignment(
        chain=tuple(_heaviest_chain(blocks, 1)),
        widest=tuple(widest),
        moved=tuple(block for block in blocks if block not in widest),
    )


def readings(a: Ids, b: Ids) -> Iterator[tuple[Block, ...]]:
    """Yield the blocks behind the first difference, in the readings that it may have.

    A region in which passages were moved is one difference: it ends at the first block
    at which both have seen the same tokens, and blocks inside it are left out.
    """
    alignment = align(a, b)
    chain, widest, moved = alignment.chain, alignment.widest, alignment.moved
    # One short passage that has moved past another: taken out here, put in there.
    if chain and 0 in (chain[0].a, chain[0].b):
        for i, block in enumerate(chain):
            if abs(block.a - block.b) <= 2 and is_moved(block, a, b):
                yield chain[i:]
    if widest and any(m.a < widest[0].a or m.b < widest[0].b for m in moved):
        for i, block in enumerate(widest):
            if is_moved(block, a, b):
                yield widest[i:]
                break
    if chain:
        yield chain
    # Passages that are much alike seem to stay where they are, in part.
    for i, block in enumerate(widest):
        inside = sum(m.length for m in moved if m.b < block.b and m.a < block.a)
        if inside >= _MOVED_SHARE * block.b and is_moved(block, a, b):
            yield widest[i:]
            break


def is_moved(block: Block, a: Ids, b: Ids) -> bool:
    """Return whether nearly the same tokens precede a block, in another order."""
    size = max(block.a, block.b)
    if size < _MIN_MOVED or abs(block.a - block.b) > 0.1 * size + 2:
        return False
    ids = np.concatenate([a[: block.a], b[: block.b]])
    _, number = np.unique(ids, return_inverse=True)
    num = int(number.max()) + 1
    counts = np.bincount(number[: block.a], minlength=num)
    counts -= np.bincount(number[block.a :], minlength=num)
    return int(np.abs(counts).sum()) <= max(2 + 2 * (size >= 24), 0.06 * size)


def _blocks(a: Ids, b: Ids) -> list[Block]:
    """Return disjoint runs of ``b`` that ``a`` has somewhere, in the order of ``b``."""
    if min(len(a), len(b)) < _GRAM:
        return _short_blocks(a, b)
    hash_a, hash_b = _grams(a), _grams(b)
    order = np.argsort(hash_a, kind="stable")
    ranked = hash_a[order]
    low = np.searchsorted(ranked, hash_b, "left")
    high = np.searchsorted(ranked, hash_b, "right")
    hits = np.flatnonzero(high > low)
    blocks: list[Block] = []
    at = 0  # first token of b that no block covers
    while len(blocks) < _MAX_BLOCKS:
        next_hit = int(np.searchsorted(hits, at))
        if next_hit == len(hits):
            break
        start = int(hits[next_hit])
        places = order[low[start] : high[start]]
        if len(places) > _MAX_CANDIDATES:  # those nearest behind the last block
            last = blocks[-1].a + blocks[-1].length if blocks else 0
            behind = places[places >= last]
            places = (behind if len(behind) else places)[:_MAX_CANDIDATES]
        best = Block(0, start, 0)
        for place in places.tolist():
            length = common_prefix(a[place:], b[start:])
            if length > best.length:
                best = Block(place, start, length)
        if best.length < _GRAM:  # a collision of hashes
            at = start + 1
            continue
        # Backwards as well: short runs before the first gram that was found.
        back = 0
        while (
            best.a - back > 0
            and start - back > at
            and a[best.a - back - 1] == b[start - back - 1]
        ):
            back += 1
        blocks.append(Block(best.a - back, start - back, best.length + back))
        at = start + best.length
    return blocks


def _short_blocks(a: Ids, b: Ids) -> list[Block]:
    """Find a continuation of a few tokens as a whole: a prefix of what follows."""
    for start in range(len(b)):
        length = common_prefix(a, b[start:])
        if length and start + length == len(b):
            return [Block(0, start, length)]
    for start in range(len(a)):
        length = common_prefix(a[start:], b)
        if length and start + length == len(a):
            return [Block(start, 0, length)]
    return []


def _grams(ids: Ids) -> NDArray[np.uint64]:
    """Return a hash per run of _GRAM tokens, [length - _GRAM + 1]."""
    num = len(ids) - _GRAM + 1
    values = ids.astype(np.uint64)
    total = np.zeros(num, np.uint64)
    with np.errstate(over="ignore"):
        for i in range(_GRAM):
            total = (total + values[i : i + num] + np.uint64(1)) * _MULTIPLIER
            total ^= total >> np.uint64(29)
    return total


def _heaviest_chain(blocks: list[Block], gap_price: int) -> list[Block]:
    """Return blocks that rise in both, with the most tokens less the price of gaps."""
    weight: list[int] = []
    previous: list[int] = []
    for i, block in enumerate(blocks):
        best, best_at = -gap_price * (block.a + block.b), -1
        for j in range(i):
            gap = block.a - blocks[j].a + block.b - blocks[j].b - 2 * blocks[j].length
            if (
                blocks[j].a + blocks[j].length <= block.a
                and (gained := weight[j] - gap_price * gap) >= best
            ):
                best, best_at = gained, j
        weight.append(best + block.length)
        previous.append(best_at)
    chain: list[Block] = []
    at = int(np.argmax(weight)) if weight else -1
    while at >= 0:
        chain.append(blocks[at])
        at = previous[at]
    return chain[::-1]
