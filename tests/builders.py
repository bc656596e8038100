"""Small trees and strategies that several test packages share."""

import os.path

import numpy as np
from hypothesis import strategies as st

from areal_dta.schedule import NeededOutputs
from areal_dta.tree import LeafOrder, PrefixTree


def make_tree(*words: str) -> PrefixTree:
    """``make_tree("ab", "ac")``: one token per letter."""
    return PrefixTree.from_sequences([[ord(c) for c in word] for word in words])


def every_token(tree: PrefixTree) -> NeededOutputs:
    """Return one more needed output at every token, including a leaf's last."""
    needed = NeededOutputs.all(tree)
    output_T = np.ones_like(needed.output_T)
    return NeededOutputs(
        needed.edge_T, output_T, tuple(node.num_tokens for node in tree.nodes)
    )


def leaf_order(sequences) -> LeafOrder:
    """``LeafOrder.from_tree`` without a tree."""
    lists = [list(map(int, s)) for s in sequences]
    order = sorted(range(len(lists)), key=lambda i: (lists[i], i))
    lcps = [
        len(os.path.commonprefix([lists[a], lists[b]]))
        for a, b in zip(order, order[1:], strict=False)
    ]
    lengths = np.array([len(lists[i]) for i in order], np.int64)
    lcp_N = np.array([0, *lcps][: len(order)], np.int64)
    return LeafOrder(np.array(order, np.int64), lengths, lcp_N)


def random_batch(
    rng: np.random.Generator, num_sequences: int, max_length: int, vocab_size: int
) -> list[list[int]]:
    """Sequences that branch off one another, with duplicates and strict prefixes."""
    batch: list[list[int]] = []
    for _ in range(num_sequences):
        base = batch[rng.integers(len(batch))] if batch and rng.random() < 0.8 else []
        keep = int(rng.integers(0, len(base) + 1))
        num_new = int(rng.integers(0, max(1, max_length - keep) + 1))
        sequence = base[:keep] + rng.integers(0, vocab_size, num_new).tolist()
        batch.append(sequence or [int(rng.integers(vocab_size))])
    return batch


def batches(max_sequences: int = 10, max_length: int = 12, vocab_size: int = 3):
    """Hypothesis strategy: batches over few tokens, so that they share a lot."""
    sequence = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_length)
    return st.lists(sequence, min_size=0, max_size=max_sequences)
