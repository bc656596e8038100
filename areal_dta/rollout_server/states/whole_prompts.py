"""Prompts of models with states: shared as a whole, or not at all.

A prefix can be shared where the state behind it is known, which is at the end of what
was computed. So equal prompts that run at the same time, such as the samples of one
prompt, share one prefill; nothing else is shared, and nothing is kept.
"""

from __future__ import annotations

from areal_dta.rollout_server.prefix_cache import (
    KVShape,
    Node,
    PrefixCache,
    TokenArray,
)


class WholePrompts(PrefixCache):
    """Prefix cache whose nodes are the prompts of running requests."""

    def __init__(self, shape: KVShape, max_unused_bytes: int) -> None:
        """Start empty; there is nothing that a budget could keep."""
        super().__init__(shape, 0)
        self._prompts: dict[bytes, Node] = {}

    def num_new_tokens(self, tokens: TokenArray) -> int:
        return 0 if tokens.tobytes() in self._prompts else len(tokens)

    def acquire(self, tokens: TokenArray) -> tuple[Node, int]:
        key = tokens.tobytes()
        is_shared = key in self._prompts
        if len(tokens) and not is_shared:
            kv = self.shape.empty(len(tokens))
            self._prompts[key] = Node(tokens.copy(), 0, kv, self.root)
            self.num_unused_tokens += len(tokens)  # in use from the next call on
        node = self._prompts.get(key, self.root)
        self._count_users(node, 1)
        return node, len(tokens) if is_shared else 0

    def release(self, node: Node) -> None:
        self._count_users(node, -1)
        if node.num_tokens and not node.num_users:
            self.num_unused_tokens -= node.num_tokens
            del self._prompts[node.tokens.tobytes()]
            self.version += 1
