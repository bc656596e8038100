"""One block: the tensors of some segments, and one call of the model on them."""

# S = block tokens, R = logit rows (positions with a label), E = edges (labels)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_dta.executor.attention import BlockAttention, active_block
from areal_dta.executor.backends import Mask
from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.path_cache import PathCache
from areal_dta.executor.token_head import token_logprobs
from areal_dta.plan import Fragmentation
from areal_dta.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class TreeTensors:
    """A cut tree and its tokens on the device, in depth-first order."""

    tree: PrefixTree
    cut: Fragmentation
    tokens: Tensor
    """[tree tokens], int64."""
    child_segments: tuple[tuple[int, ...], ...]
    max_depth: int

    @classmethod
    def of(
        cls, tree: PrefixTree, cut: Fragmentation, device: torch.device
    ) -> TreeTensors:
        children: list[list[int]] = [[] for _ in cut.segments]
        for segment in cut.segments:
            if segment.parent >= 0:
                children[segment.parent].append(segment.index)
        tokens = np.concatenate(
            [node.tokens for node in tree.nodes] or [np.empty(0, np.int64)]
        )
        return cls(
            tree=tree,
            cut=cut,
            tokens=torch.from_numpy(tokens).to(device),
            child_segments=tuple(map(tuple, children)),
            max_depth=tree.max_depth,
        )


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where everything of a block lies. Index arrays are int64, on the host."""

    offsets: dict[int, int]
    """Segment -> its first position in the block."""
    token_S: np.ndarray
    """Tree token index of each position."""
    depth_S: np.ndarray
    row_R: np.ndarray
    """Positions that have at least one label."""
    edge_row_E: np.ndarray
    """Which of the rows predicts the edge's token."""
    edge_token_E: np.ndarray
    """Tree token index of the predicted token: an edge's name in the whole tree."""
    visible_SS: np.ndarray | None
    """bool; None where the block is one chain and plain causal."""


def lay_out(tensors: TreeTensors, segments: Sequence[int]) -> BlockLayout:
    """Lay segments out one behind the other; parents must precede children."""
    all_segments = tensors.cut.segments
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
        edge_position.append(np.arange(offset, end - 1))
        edge_token.append(token_S[offset + 1 : end])
        children = tensors.child_segments[index]
        edge_position.append(np.full(len(children), end - 1, np.int64))
        edge_token.append(
            np.array([all_segments[c].first_token for c in children], np.int64)
        )
    row_R, edge_row_E = np.unique(np.concatenate(edge_position), return_inverse=True)

    first, *rest = segments
    pairs = zip(segments, rest, strict=False)
    is_chain = all(all_segments[below].parent == above for above, below in pairs)
    return BlockLayout(
        offsets=offsets,
        token_S=token_S,
        depth_S=depth_S,
        row_R=row_R,
        edge_row_E=edge_row_E,
        edge_token_E=np.concatenate(edge_token),
        visible_SS=None if is_chain else _visibility(tensors.cut, offsets, size),
    )


def _visibility(cut: Fragmentation, offsets: dict[int, int], size: int) -> np.ndarray:
    """Who sees whom inside a branching block: ancestors and oneself."""
    visible = np.zeros((size, size), dtype=bool)
    for index, offset in offsets.items():
        s = cut.segments[index]
        end = offset + s.num_tokens
        if s.parent in offsets:
            last = offsets[s.parent] + cut.segments[s.parent].num_tokens - 1
            visible[offset:end] = visible[last]
        visible[offset:end, offset:end] = np.tri(s.num_tokens, dtype=bool)
    return visible


@dataclass(slots=True)
class BlockOutput:
    """What a run leaves: part of its autograd graph if it had one."""

    layout: BlockLayout
    logprob_E: Tensor
    entropy_R: Tensor
    keys: list[Tensor]
    """Per layer [1, K, S, H]; empty unless kept."""
    values: list[Tensor]


def run_block(
    model: PreTrainedModel,
    config: ExecutorConfig,
    tensors: TreeTensors,
    path: PathCache,
    path_tokens: int,
    segments: Sequence[int],
    keep_kv: bool,
) -> BlockOutput:
    """Call the model on ``segments`` behind the path that ``path`` holds.

    Raises:
        UnsupportedModelError: a layer asks for something a tree cannot give.
    """
    layout = lay_out(tensors, segments)
    device = tensors.tokens.device
    token_S = torch.from_numpy(layout.token_S).to(device)
    row_R = torch.from_numpy(layout.row_R).to(device)
    visible = None
    if layout.visible_SS is not None:
        visible = torch.from_numpy(layout.visible_SS).to(device)
    block = BlockAttention(
        path=path,
        path_tokens=path_tokens,
        mask=Mask(causal=visible is None, visible_SS=visible),
        backend_name=config.attention_backend,
        max_depth=tensors.max_depth,
        keep_kv=keep_kv,
    )
    num_layers = len(path.layers)
    with active_block(block, num_layers):
        call: Any = model
        logits = call(
            input_ids=tensors.tokens[token_S][None],
            position_ids=torch.from_numpy(layout.depth_S).to(device)[None],
            use_cache=False,
            # a block without labels still needs its K/V: project one row, read none
            logits_to_keep=row_R if len(row_R) else 1,
        ).logits[0]
    edge_token_E = torch.from_numpy(layout.edge_token_E).to(device)
    logprob_E, entropy_R = token_logprobs(
        logits[: len(row_R)],
        torch.from_numpy(layout.edge_row_E).to(device),
        tensors.tokens[edge_token_E],
        config.temperature,
    )
    return BlockOutput(
        layout=layout,
        logprob_E=logprob_E,
        entropy_R=entropy_R,
        keys=[block.keys[i] for i in range(num_layers)] if keep_kv else [],
        values=[block.values[i] for i in range(num_layers)] if keep_kv else [],
    )
