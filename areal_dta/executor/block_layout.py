"""Where everything of a block lies: positions, rows, edges, and who sees whom."""

# S = block tokens, R = rows (positions that are read), E = edges (labels)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_dta.executor.block_shape import BlockShape
from areal_dta.schedule import Fragmentation, Segment
from areal_dta.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class TreeTensors:
    """A cut tree and its tokens on the device, in depth-first order."""

    tree: PrefixTree
    cut: Fragmentation
    tokens: Tensor
    """[tree tokens], int64."""

    @classmethod
    def of(
        cls, tree: PrefixTree, cut: Fragmentation, device: torch.device
    ) -> TreeTensors:
        tokens = np.concatenate(
            [node.tokens for node in tree.nodes] or [np.empty(0, np.int64)]
        )
        return cls(tree, cut, torch.from_numpy(tokens).to(device))

    def next_tokens(self, segment: Segment) -> list[int]:
        """Tree tokens that may follow a segment's last one."""
        node = self.tree.nodes[segment.node]
        if segment.end < node.end:
            return [segment.first_token + segment.num_tokens]
        return [self.tree.nodes[c].first_token for c in node.children]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where everything of a block lies. Index arrays are int64, on the host."""

    offsets: dict[int, int]
    """Segment -> its first position in the block."""
    token_S: np.ndarray
    """Tree token index of each position."""
    depth_S: np.ndarray
    row_R: np.ndarray
    """Positions that outputs are read from."""
    edge_row_E: np.ndarray
    """Which of the rows predicts the edge's token; ascending."""
    edge_token_E: np.ndarray
    """Tree token index of the predicted token: an edge's name in the whole tree."""
    shape: BlockShape
    """Who sees whom."""


def lay_out(tensors: TreeTensors, segments: Sequence[int]) -> BlockLayout:
    """Lay segments out one behind the other; parents must precede children."""
    all_segments, reads = tensors.cut.segments, tensors.cut.reads
    offsets: dict[int, int] = {}
    size = 0
    for index in segments:
        offsets[index] = size
        size += all_segments[index].num_tokens

    token_S = np.empty(size, np.int64)
    depth_S = np.empty(size, np.int64)
    edge_position: list[np.ndarray] = []
    edge_token: list[np.ndarray] = []
    for index, offset in offsets.items():
        s = all_segments[index]
        end = offset + s.num_tokens
        token_S[offset:end] = np.arange(s.first_token, s.first_token + s.num_tokens)
        depth_S[offset:end] = np.arange(s.start, s.end)
        following = np.array(tensors.next_tokens(s), np.int64)
        edge_position.append(np.arange(offset, end - 1))
        edge_position.append(np.full(len(following), end - 1, np.int64))
        edge_token += [token_S[offset + 1 : end], following]
    position_E, token_E = np.concatenate(edge_position), np.concatenate(edge_token)
    is_read = reads.edge_T[token_E]
    position_E, token_E = position_E[is_read], token_E[is_read]
    row_R = np.flatnonzero(reads.row_T[token_S])

    order = {index: i for i, index in enumerate(segments)}
    shape = BlockShape(
        lengths=[all_segments[index].num_tokens for index in segments],
        parents=[order.get(all_segments[index].parent, -1) for index in segments],
    )
    return BlockLayout(
        offsets=offsets,
        token_S=token_S,
        depth_S=depth_S,
        row_R=row_R,
        edge_row_E=np.searchsorted(row_R, position_E),
        edge_token_E=token_E,
        shape=shape,
    )
