"""Radix tree over tokens that keeps the keys and values of prompts and answers.

Agents send their whole history with every call, and a group's samples send one prompt;
both find here what has been computed. A node is a run of tokens with its K/V. Requests
*acquire* the path of their tokens: what is there is shared, the rest becomes a node
that the requests' own prefill fills. Acquired paths stay; of the others, least recently
used leaves are cut, or go, until their K/V fit into the budget. K/V of running requests
are not the budget's: `max_cached_tokens` bounds those.

Invariants (`check` in tests/rollout_server/test_prefix_cache.py):
  * siblings start with different tokens; only the root is empty;
  * a node has at least as many users as its children together;
  * what nobody uses is complete, and takes at most the budget.
"""

# L = layers, K = key/value heads, S = tokens, D = head dim

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_dta.tree.prefix_tree import common_prefix

TokenArray = NDArray[np.int64]
_MIN_LEAVES = 64
_MIN_KEPT_TOKENS = 64


class KV(NamedTuple):
    """Keys and values of a run of tokens, for all layers."""

    keys: Tensor
    """[L, K, S, D]."""
    values: Tensor

    def part(self, start: int, end: int) -> KV:
        return KV(self.keys[:, :, start:end], self.values[:, :, start:end])


@dataclass(frozen=True, slots=True)
class KVShape:
    """Sizes of one token's keys and values: the maximum over the layers."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        width = self.key_dim + self.value_dim
        return self.num_layers * self.num_heads * width * self.dtype.itemsize

    def empty(self, num_tokens: int) -> KV:
        """Allocate K/V [L, K, S, D] that are still to be computed."""
        first = (self.num_layers, self.num_heads, num_tokens)
        keys, values = (
            torch.empty(*first, width, dtype=self.dtype, device=self.device)
            for width in (self.key_dim, self.value_dim)
        )
        return KV(keys, values)


class Node:
    """A run of tokens at depth [start, end) of its paths."""

    __slots__ = (
        "tokens",
        "start",
        "kv",
        "num_filled",
        "parent",
        "children",
        "num_users",
        "last_used",
        "states",
    )

    def __init__(
        self, tokens: TokenArray, start: int, kv: KV, parent: Node | None
    ) -> None:
        self.tokens, self.start, self.kv, self.parent = tokens, start, kv, parent
        #: Tokens whose K/V have been computed, from the front.
        self.num_filled = 0
        self.children: dict[int, Node] = {}
        #: Requests that have acquired this node or one below it.
        self.num_users = 0
        self.last_used = 0
        #: Of layers that carry one, behind the last token that was computed.
        self.states: dict[Any, Tensor] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_complete(self) -> bool:
        return self.num_filled == len(self.tokens)

    def path(self) -> list[Node]:
        """Return the nodes from the first below the root down to this one."""
        found: list[Node] = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


class PrefixCache:
    """Not thread-safe."""

    def __init__(self, shape: KVShape, max_unused_bytes: int) -> None:
        """Start empty.

        Args:
            max_unused_bytes: budget of K/V that no request uses; 0 keeps none, so that
                only requests that run at the same time share.
        """
        self.shape = shape
        self.max_unused_bytes = max_unused_bytes
        #: Rises whenever nodes are cut, joined or removed.
        self.version = 0
        self._clock = 0
        self.num_used_tokens = 0
        self.num_unused_tokens = 0
        self.root = Node(np.zeros(0, np.int64), 0, shape.empty(0), None)
        # (last_used, tie break, node): leaves that may go; entries may be out of date.
        self._leaves: list[tuple[int, int, Node]] = []
        self._num_pushed = 0
        self._max_leaves = _MIN_LEAVES

    @property
    def num_unused_bytes(self) -> int:
        return self.num_unused_tokens * self.shape.bytes_per_token

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def num_new_tokens(self, tokens: TokenArray) -> int:
        """Return how many more tokens are in use once these are acquired."""
        node, depth = self._match(tokens)
        while node.parent is not None and not node.num_users:
            node, depth = node.parent, node.start
        return len(tokens) - depth

    def acquire(self, tokens: TokenArray) -> tuple[Node, int]:
        """Find or make the path of these tokens, and keep it until `release`.

        Returns:
            Its last node, and how many tokens were there already (their K/V computed,
            or to be computed for another request).
        """
        node, depth = self._match(tokens)
        if depth < node.end:
            node = self._split(node, depth)
        if depth < len(tokens):
            new = Node(
                tokens[depth:].copy(),
                depth,
                self.shape.empty(len(tokens) - depth),
                node,
            )
            node.children[int(tokens[depth])] = new
            self.num_unused_tokens += new.num_tokens  # until the loop below
            node = new
        self._count_users(node, 1)
        return node, depth

    def release(self, node: Node) -> None:
        """End the use of an acquired path."""
        self._count_users(node, -1)
        self._clock += 1
        while node.parent is not None:
            parent = node.parent
            node.last_used = self._clock
            if not node.num_users and not node.is_complete:
                self._trim(node)  # nobody will fill the rest
            if not node.num_users and not node.children:
                self._push(node)
            node = parent
        self._evict()

    def insert(
        self, tokens: TokenArray, start: int, copy_kv: Callable[[int, int], KV]
    ) -> None:
        """Keep K/V that have been computed elsewhere, within the budget.

        Args:
            tokens: the whole path.
            start: first token that `copy_kv` has; those above must be in the tree.
            copy_kv: returns a copy of the K/V of the tokens [start, end).
        """
        node, depth = self._match(tokens)
        size = (len(tokens) - depth) * self.shape.bytes_per_token
        if (
            depth == len(tokens)
            or depth < start
            or size > self.max_unused_bytes
            # Somebody is about to compute tokens of this very path.
            or node.num_filled < depth - node.start
        ):
            return
        self._clock += 1
        if depth < node.end:
            node = self._split(node, depth)
        new = Node(tokens[depth:].copy(), depth, copy_kv(depth, len(tokens)), node)
        new.num_filled = new.num_tokens
        node.children[int(tokens[depth])] = new
        self.num_unused_tokens += new.num_tokens
        for above in new.path():
            above.last_used = self._clock
        self._push(new)
        self._evict()

    def join_chain(self, node: Node) -> None:
        """Join short nodes above `node` with it where nobody else needs the cut.

        Each node costs a call of attention per layer. Nodes are joined while the upper
        one is at most twice as long as all below it, so that a token is copied
        O(log length) times however often its history grows.
        """
        chain, length = [node], node.num_tokens
        while (above := chain[-1].parent) is not None and above.parent is not None:
            if (
                len(above.children) > 1
                or above.num_users != node.num_users
                or not above.is_complete
                or above.num_tokens > 2 * length
            ):
                break
            chain.append(above)
            length += above.num_tokens
        if len(chain) == 1 or not node.is_complete:
            return
        top, parts = chain[-1], chain[::-1]
        node.tokens = np.concatenate([part.tokens for part in parts])
        node.kv = KV(
            torch.cat([part.kv.keys for part in parts], 2),
            torch.cat([part.kv.values for part in parts], 2),
        )
        node.start, node.parent, node.num_filled = top.start, top.parent, length
        assert node.parent is not None
        node.parent.children[int(node.tokens[0])] = node
        self.version += 1

    def clear(self) -> None:
        """Drop everything; nothing may be in use."""
        assert not self.num_used_tokens
        self.root.children.clear()
        self._leaves.clear()
        self.num_unused_tokens = 0
        self.version += 1

    def _match(self, tokens: TokenArray) -> tuple[Node, int]:
        """Return the deepest node that shares tokens, and how many are shared."""
        node, depth = self.root, 0
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            node = child
            depth += common_prefix(child.tokens, tokens[depth:])
            if depth < child.end:
                break
        return node, depth

    def _split(self, node: Node, depth: int) -> Node:
        """Cut a node, and return the new upper part; `node` stays the lower one."""
        # Copies, not views: a view would keep all of the memory when its half goes.
        cut = depth - node.start
        upper = Node(node.tokens[:cut], node.start, _copy(node.kv, 0, cut), node.parent)
        upper.num_filled = min(node.num_filled, cut)
        upper.num_users, upper.last_used = node.num_users, node.last_used
        assert node.parent is not None
        node.parent.children[int(upper.tokens[0])] = upper
        node.kv = _copy(node.kv, cut, node.num_tokens)
        node.tokens, node.start, node.parent = node.tokens[cut:], depth, upper
        node.num_filled = max(0, node.num_filled - cut)
        upper.children[int(node.tokens[0])] = node
        self.version += 1
        return upper

    def _trim(self, node: Node) -> None:
        """Drop the tokens of a node that have not been computed."""
        assert not node.children
        self.num_unused_tokens -= node.num_tokens - node.num_filled
        if not node.num_filled:
            self._unlink(node)
            return
        node.kv = _copy(node.kv, 0, node.num_filled)
        node.tokens = node.tokens[: node.num_filled]
        self.version += 1

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[int(node.tokens[0])]
        node.parent = None
        self.version += 1

    def _count_users(self, node: Node, change: int) -> None:
        for above in node.path():
            was_used = above.num_users > 0
            above.num_users += change
            moved = (above.num_users > 0) - was_used
            self.num_used_tokens += moved * above.num_tokens
            self.num_unused_tokens -= moved * above.num_tokens

    def _push(self, node: Node) -> None:
        if node.parent is None:
            return
        self._num_pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._num_pushed, node))
        if len(self._leaves) > self._max_leaves:  # most are out of date
            self._leaves = [entry for entry in self._leaves if self._may_go(entry)]
            heapq.heapify(self._leaves)
            self._max_leaves = max(_MIN_LEAVES, 2 * len(self._leaves))

    def _may_go(self, entry: tuple[int, int, Node]) -> bool:
        last_used, _, node = entry
        return (
            node.parent is not None
            and not node.num_users
            and not node.children
            and node.last_used == last_used
        )

    def _evict(self) -> None:
        while self.num_unused_bytes > self.max_unused_bytes:
            entry = heapq.heappop(self._leaves)
            if not self._may_go(entry):
                continue
            node = entry[2]
            parent = node.parent
            assert parent is not None
            # A long node loses its end alone, a quarter at least, so that its front is
            # not copied again for each token too many.
            excess = self.num_unused_bytes - self.max_unused_bytes
            num_lost = max(
                -(-excess // self.shape.bytes_per_token), node.num_tokens // 4
            )
            if node.num_tokens - num_lost >= _MIN_KEPT_TOKENS:
                node.num_filled -= num_lost
                self._trim(node)
                self._push(node)
                continue
            self.num_unused_tokens -= node.num_tokens
            self._unlink(node)
            if not parent.num_users and not parent.children:
                self._push(parent)


def as_tokens(tokens: Sequence[int]) -> TokenArray:
    return np.array(tokens, np.int64)


def _copy(kv: KV, start: int, end: int) -> KV:
    part = kv.part(start, end)
    return KV(*(x.clone(memory_format=torch.contiguous_format) for x in part))
