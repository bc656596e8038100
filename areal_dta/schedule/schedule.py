"""Depth-first schedule over fragments, with the counts that it implies.

A schedule is plain data: its token counts and peak memory are known, and can be tested
or balanced, before anything runs.

A fragment with child fragments is entered (forward, K/V kept for the children) and,
when all children are done, exited (backward). A fragment without children does
everything at its exit.

Retain or recompute: the graph of an entered fragment stays alive until its exit, or the
fragment is entered without a graph, on its trunk alone, and is run again at its exit.
``retention`` chooses; graphs alive at any time never exceed
max(retain_tokens, block_tokens) tokens (tests/schedule/test_retention.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from areal_dta.schedule.fragments import Fragmentation, cut_nodes, cut_tree
from areal_dta.schedule.needed_outputs import NeededOutputs
from areal_dta.schedule.retention import Kept, PartialGraph, choose_retained
from areal_dta.tree import PrefixTree

DEFAULT_BLOCK_TOKENS = 512
"""Larger blocks are no faster on a CPU, see docs/log.md. On a device,
``executor.memory.budget`` chooses the block size."""


class StepKind(Enum):
    ENTER = "enter"
    EXIT = "exit"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the traversal."""

    kind: StepKind
    fragment: int
    computes: tuple[int, ...]
    """Segments run forward in this step; empty where the graph is still alive."""
    with_grad: bool
    """Whether that forward keeps its autograd graph."""
    num_tokens: int
    """Tokens of ``computes``."""
    num_outputs: int
    """Positions of ``computes`` at which an output is needed."""
    keeps_part: bool = False
    """Whether MLPs and norms are left out of that graph, and run again."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Depth-first steps over a cut tree, with the counts that they imply."""

    cut: Fragmentation
    steps: tuple[Step, ...]
    training: bool
    num_blocks: int
    """Calls of the model."""
    num_forward_tokens: int
    """Tokens run forward, recomputed ones counted twice."""
    num_recomputed_tokens: int
    num_backward_tokens: int
    peak_graph_tokens: int
    """Maximum number of tokens whose autograd graph is alive at once; those of partial
    graphs count by their size where whole ones are there too."""
    peak_kv_tokens: int
    """Maximum number of tokens whose K/V is held at once, on the path or in trunks."""


def build_schedule(
    tree: PrefixTree,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    retain_tokens: int | None = None,
    training: bool = True,
    needed: NeededOutputs | None = None,
    fragments: str = "packed",
    part: PartialGraph | None = None,
    only_parts: bool = False,
) -> Schedule:
    """Build the schedule of a tree.

    Args:
        block_tokens: maximum number of tokens per model call.
        retain_tokens: maximum number of tokens whose graph may wait for an exit. 0
            retains none (least memory), None all (no recomputation).
        training: False builds a forward-only schedule without graphs.
        needed: the outputs that the loss reads, by default all.
        fragments: ``packed`` fills blocks up to ``block_tokens``; ``node`` runs one
            tree node per block, however long, as the plain method does.
        part: what graphs without MLPs and norms take and cost, to keep some of those
            whose fragments wait for an exit; None: graphs are whole.
        only_parts: no graph has MLPs and norms.

    Raises:
        ValueError: a budget is out of range, or ``fragments`` unknown.
    """
    if retain_tokens is not None and retain_tokens < 0:
        raise ValueError(
            f"retain_tokens={retain_tokens}; expected None (retain all) or >= 0"
        )
    if fragments not in ("packed", "node"):
        raise ValueError(f"fragments={fragments!r}; expected packed or node")
    if fragments == "node":
        cut = cut_nodes(tree, needed)
    else:
        cut = cut_tree(tree, block_tokens, needed)
    outputs_before = np.concatenate([[0], np.cumsum(cut.needed.output_T)])
    num_outputs = [
        int(
            outputs_before[s.first_token + s.num_tokens] - outputs_before[s.first_token]
        )
        for s in cut.segments
    ]
    retained = choose_retained(cut.fragments, retain_tokens, part)

    steps: list[Step] = []
    peak_graph = peak_kv = trunks = recomputed = 0
    graphs: dict[int, int] = {}  # alive, in tokens, by fragment
    path_buffer = max((f.path_tokens for f in cut.fragments), default=0)
    # Visit (fragment, is_exit) from a stack: trees may be deeper than recursion allows.
    stack = [(f.index, False) for f in reversed(cut.fragments) if f.parent < 0]
    while stack:
        index, is_exit = stack.pop()
        f = cut.fragments[index]
        is_leaf = not f.children
        is_exit |= is_leaf
        retain = bool(retained[index]) and training
        # What runs: at enter all of it if nothing runs again, else only what the
        # children attend to; at exit all of it, unless its graph was retained.
        if not is_exit:
            kind, with_grad, is_whole = StepKind.ENTER, retain, retain or not training
            computes = f.segments if is_whole else f.trunk
            stack.append((index, True))
            stack += [(c, False) for c in reversed(f.children)]
            trunks += f.num_trunk_tokens
        else:
            is_whole = is_leaf or (training and not retain)
            kind, with_grad = StepKind.EXIT, training and is_whole
            computes = f.segments if is_whole else ()
            recomputed += f.num_trunk_tokens if is_whole and not is_leaf else 0
        num_tokens = sum(cut.segments[s].num_tokens for s in computes)
        outputs = sum(num_outputs[s] for s in computes)
        is_part = retained[index] is Kept.PART
        keeps_part = with_grad and (only_parts or is_part)
        steps.append(
            Step(kind, index, computes, with_grad, num_tokens, outputs, keeps_part)
        )
        # Peaks count what this step adds; an exit then frees the fragment's share.
        if with_grad:
            n = f.num_tokens
            graphs[index] = part.tokens(n) if is_part and part is not None else n
        peak_graph = max(peak_graph, sum(graphs.values()))
        peak_kv = max(peak_kv, path_buffer + trunks)
        if is_exit:
            graphs.pop(index, None)
            trunks -= 0 if is_leaf else f.num_trunk_tokens
    assert not graphs and trunks == 0

    return Schedule(
        cut=cut,
        steps=tuple(steps),
        training=training,
        num_blocks=sum(1 for s in steps if s.computes),
        num_forward_tokens=sum(s.num_tokens for s in steps),
        num_recomputed_tokens=recomputed,
        num_backward_tokens=cut.needed.num_computed_tokens if training else 0,
        peak_graph_tokens=peak_graph,
        peak_kv_tokens=peak_kv,
    )
