"""The depth-first schedule over fragments, and what it will cost.

A schedule is plain data: its token counts and peak memory are known, and can be
tested, drawn or balanced, before anything runs.

A fragment with child fragments is entered (forward, K/V kept for the children) and,
when all children are done, exited (backward). One without does everything at exit.

Retain or recompute: the graph of an entered fragment stays alive until its exit, or it
is entered without a graph, on its trunk alone, and run again at exit. ``retention``
keeps those that save the most, such that the graphs alive at any time never exceed
max(retain_tokens, block_tokens) tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from areal_dta.schedule.fragments import Fragmentation, cut_nodes, cut_tree
from areal_dta.schedule.needed_outputs import NeededOutputs
from areal_dta.schedule.retention import choose_retained
from areal_dta.tree import PrefixTree

DEFAULT_BLOCK_TOKENS = 512
"""Larger blocks are slower on a CPU, see docs/log.md."""


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
    """Whether that forward keeps an autograd graph."""
    num_tokens: int
    """Tokens of ``computes``."""
    num_outputs: int
    """Positions of ``computes`` that are projected onto the vocabulary."""


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
    """Most tokens whose autograd graph is alive at once."""
    peak_kv_tokens: int
    """Most tokens whose K/V is held at once: the path buffer and the open trunks."""

    def retains(self, fragment: int) -> bool:
        """Whether the fragment is run just once."""
        return all(
            step.with_grad or not self.training
            for step in self.steps
            if step.fragment == fragment and step.computes
        )


def build_schedule(
    tree: PrefixTree,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    retain_tokens: int | None = None,
    training: bool = True,
    needed: NeededOutputs | None = None,
    fragments: str = "packed",
) -> Schedule:
    """Plan the traversal of a tree.

    Args:
        block_tokens: most tokens of one model call.
        retain_tokens: most tokens whose graph may wait for an exit; 0 retains none
            (least memory), None all (no recomputation).
        training: False plans a forward-only traversal without graphs.
        needed: the outputs that are read, by default all.
        fragments: ``packed`` fills blocks up to ``block_tokens``; ``node`` runs one
            tree node a block, however long, as the plain method does.

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
    retained = choose_retained(cut.fragments, retain_tokens)

    steps: list[Step] = []
    peak_graph = graph = 0
    path_buffer = max((f.path_tokens for f in cut.fragments), default=0)
    peak_kv = trunks = 0
    recomputed = 0
    # (fragment, leaving): a stack, since trees may be deeper than recursion allows
    stack = [(f.index, False) for f in reversed(cut.fragments) if f.parent < 0]
    while stack:
        index, leaving = stack.pop()
        f = cut.fragments[index]
        is_leaf = not f.children
        retain = retained[index]
        if not leaving and not is_leaf:
            keep_graph = training and retain
            whole = keep_graph or not training
            computes = f.segments if whole else f.trunk
            steps.append(
                Step(
                    StepKind.ENTER,
                    index,
                    computes,
                    keep_graph,
                    f.num_tokens if whole else f.num_trunk_tokens,
                    sum(num_outputs[s] for s in computes),
                )
            )
            graph += f.num_tokens if keep_graph else 0
            trunks += f.num_trunk_tokens
            stack.append((index, True))
            stack += [(c, False) for c in reversed(f.children)]
        else:
            run_now = is_leaf or (training and not retain)
            computes = f.segments if run_now else ()
            steps.append(
                Step(
                    StepKind.EXIT,
                    index,
                    computes,
                    training and run_now,
                    f.num_tokens if run_now else 0,
                    sum(num_outputs[s] for s in computes),
                )
            )
            graph += f.num_tokens if training and run_now else 0
            recomputed += f.num_trunk_tokens if run_now and not is_leaf else 0
        peak_graph, peak_kv = max(peak_graph, graph), max(peak_kv, path_buffer + trunks)
        if steps[-1].kind is StepKind.EXIT:
            graph -= f.num_tokens if training else 0
            trunks -= 0 if is_leaf else f.num_trunk_tokens
    assert graph == 0 and trunks == 0

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
