"""Predicted time and memory of the ways to train one batch.

Time is counted in FLOPs, and in what the softmax over the vocabulary takes beside its
products, in the same unit: measured on a CPU (docs/inspect.md), not on a GPU, where
FLOPs alone are counted. Memory follows a schedule step by step. Each way is that of
``scripts/bench_executor.py``, which measures what is predicted here:

  dense       one sequence at a time, logits at every position
  dense_ckpt  the same with activation checkpointing
  packed      trees in one call each, with a mask; large ones are cut at 24,576 tokens
  dta         this package: blocks of the tree, outputs where the loss reads them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from areal_dta.inspect.models import ModelSizes
from areal_dta.schedule import (
    DEFAULT_BLOCK_TOKENS,
    NeededOutputs,
    Schedule,
    StepKind,
    build_schedule,
)
from areal_dta.tree import PrefixTree
from areal_dta.tree.leaf_order import LeafOrder
from areal_dta.tree.prefix_tree import attended_pairs

_FP32: Final = 4
_ENTROPY_ROWS: Final = 1024  # of which dense training takes the entropy at once
_PACKED_TOKENS: Final = 24576  # of a packed tree, unless one sequence is longer
MAX_BLOCK_TOKENS: Final = {"cpu": DEFAULT_BLOCK_TOKENS, "gpu": 4096}
_MIN_BLOCK_TOKENS: Final = {"cpu": 32, "gpu": 256}
_RETAIN_SHARES: Final = (0.5, 0.25, 0.125, 0.0625)  # of the tree, that are tried


@dataclass(frozen=True, slots=True)
class Overheads:
    """What takes time beside the products, in FLOPs of the same time."""

    per_logit: float
    """Softmax, its gradient and the entropy, of whole logits."""
    per_fused_logit: float
    """The same in the executor's head."""
    per_call: float
    """Overhead of a call of the model, in tokens."""
    masked_pair: float
    """Price of a pair under a mask, in pairs without one."""


OVERHEADS: Final = {
    "cpu": Overheads(
        per_logit=900.0, per_fused_logit=400.0, per_call=4.0, masked_pair=1.0
    ),
    "gpu": Overheads(
        per_logit=0.0, per_fused_logit=0.0, per_call=16.0, masked_pair=1.0
    ),
}


@dataclass(frozen=True, slots=True)
class Way:
    """Prediction for one way to train the batch."""

    name: str
    flops: float
    """FLOPs, forward and backward, recomputation included."""
    cost: float
    """FLOPs and what takes as long; the ratio of two is that of their times."""
    peak_bytes: float
    """Activations, keys and values; parameters and their gradients apart."""
    num_calls: int
    """Calls of the model."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Budgets of the executor; ``block_tokens`` None: the largest that fits."""

    memory_bytes: float | None = None
    block_tokens: int | None = None
    retain_tokens: int | None = None
    is_retain_given: bool = False


@dataclass(frozen=True, slots=True)
class Prediction:
    ways: tuple[Way, ...]
    """dense, dense_ckpt, packed, dta."""
    schedule: Schedule
    block_tokens: int
    retain_tokens: int | None
    fits: bool
    """Whether the schedule is predicted to fit; True without a memory budget."""

    def way(self, name: str) -> Way:
        return next(way for way in self.ways if way.name == name)

    def speed_up(self, name: str, over: str = "dense") -> float:
        """Return how many times faster one way is than another."""
        cost = self.way(name).cost
        return self.way(over).cost / cost if cost else 1.0


def predict(
    tree: PrefixTree, needed: NeededOutputs, model: ModelSizes, budgets: Budgets
) -> Prediction:
    """Predict every way, with the fastest schedule that fits."""
    schedule, retain, way, fits = _best_schedule(tree, needed, model, budgets)
    lengths = [tree.sequence_length(i) for i in range(tree.num_sequences)]
    return Prediction(
        ways=(
            _dense(lengths, model, False),
            _dense(lengths, model, True),
            _packed(tree, model),
            way,
        ),
        schedule=schedule,
        block_tokens=schedule.cut.block_tokens,
        retain_tokens=retain,
        fits=fits,
    )


def _best_schedule(
    tree: PrefixTree, needed: NeededOutputs, model: ModelSizes, budgets: Budgets
) -> tuple[Schedule, int | None, Way, bool]:
    """Return the fastest schedule that fits, its retain budget, and its costs."""
    blocks = [budgets.block_tokens or MAX_BLOCK_TOKENS[model.device]]
    retains: list[int | None] = [budgets.retain_tokens]
    limit = budgets.memory_bytes
    if limit is not None:
        while (
            budgets.block_tokens is None
            and blocks[-1] // 2 >= _MIN_BLOCK_TOKENS[model.device]
        ):
            blocks.append(blocks[-1] // 2)
        if not budgets.is_retain_given:
            # What waits for an exit is a path, so no more than the longest is needed.
            retains = [None]
            retains += [int(tree.max_depth * share) for share in _RETAIN_SHARES]
            retains.append(0)
    best: tuple[Schedule, int | None, Way] | None = None
    smallest: tuple[Schedule, int | None, Way] | None = None
    for block in blocks:
        for retain in retains:
            schedule = build_schedule(tree, block, retain, needed=needed)
            found = schedule, retain, dta_way(tree, schedule, model)
            if smallest is None or found[2].peak_bytes < smallest[2].peak_bytes:
                smallest = found
            if limit is not None and found[2].peak_bytes > limit:
                continue
            if best is None or found[2].cost < best[2].cost:
                best = found
        if best is not None:  # smaller blocks are slower
            break
    assert smallest is not None
    return *(best or smallest), best is not None


def _dense(lengths: Sequence[int], model: ModelSizes, checkpointing: bool) -> Way:
    flops, over = model.flops, OVERHEADS[model.device]
    tokens = sum(lengths)
    pairs = sum(attended_pairs(0, n) for n in lengths)
    layers = flops.per_token * tokens + flops.per_pair * pairs
    head = flops.per_output * tokens
    total = (4.0 if checkpointing else 3.0) * layers + 3.0 * head
    logits = float(tokens) * model.vocab_size
    cost = total + over.per_logit * logits
    cost += 3.0 * over.per_call * flops.per_token * len(lengths)
    longest = max(lengths, default=0)
    peak = _whole_bytes(longest, model, checkpointing)
    name = "dense_ckpt" if checkpointing else "dense"
    return Way(name, total, cost, peak, len(lengths))


def _packed(tree: PrefixTree, model: ModelSizes) -> Way:
    flops, over = model.flops, OVERHEADS[model.device]
    sizes = _packed_sizes(tree)
    tokens = sum(sizes)
    pairs = sum(float(n) * n for n in sizes)  # masked ones are computed as well
    layers = flops.per_token * tokens + flops.per_pair * pairs * over.masked_pair
    total = 3.0 * (layers + flops.per_output * tokens)
    cost = total + over.per_logit * tokens * model.vocab_size
    cost += 3.0 * over.per_call * flops.per_token * len(sizes)
    largest = max(sizes, default=0)
    mask = float(largest) ** 2 * model.element_bytes
    peak = _whole_bytes(largest, model, False) + mask
    return Way("packed", total, cost, peak, len(sizes))


def _packed_sizes(tree: PrefixTree) -> list[int]:
    """Return the tokens of each tree: neighbours in depth-first order, as many as fit,
    and none that share nothing."""
    order = LeafOrder.from_tree(tree)
    sizes: list[int] = []
    pairs = zip(order.length_N.tolist(), order.lcp_N.tolist(), strict=True)
    for length, shared in pairs:
        new = length - shared
        if sizes and shared and sizes[-1] + new <= _PACKED_TOKENS:
            sizes[-1] += new
        else:
            sizes.append(length)
    return sizes


def _whole_bytes(num_tokens: int, model: ModelSizes, checkpointing: bool) -> float:
    """Return the peak of one call over all tokens, logits at every position."""
    memory, n = model.memory, num_tokens
    graph = n * memory.graph_bytes
    layer = graph / memory.num_layers
    if checkpointing:
        graph = n * memory.hidden_bytes * memory.num_layers
    # Rows of logits that are alive at once: the logits, their log-softmax and two
    # pieces of the entropy; or log-softmax and two gradients.
    rows = max(2 * n + 2 * min(n, _ENTROPY_ROWS), 3 * n)
    acc = max(model.element_bytes, _FP32)
    head = float(rows) * model.vocab_size * acc
    if model.element_bytes < _FP32:  # and the logits in half precision
        head += float(n) * model.vocab_size * model.element_bytes
    return graph + max(head, layer * (1 + checkpointing))


def dta_way(tree: PrefixTree, schedule: Schedule, model: ModelSizes) -> Way:
    """Predict a schedule."""
    flops, over = model.flops, OVERHEADS[model.device]
    segments = schedule.cut.segments
    total = cost = 0.0
    for step in schedule.steps:
        if not step.computes:
            continue
        pairs = sum(
            attended_pairs(segments[s].start, segments[s].end) for s in step.computes
        )
        factor = 3.0 if step.with_grad else 1.0
        products = flops.forward(step.num_tokens, pairs, step.num_outputs)
        # Behind its attention the last layer runs where an output is read, no further.
        idle = step.num_tokens - step.num_outputs
        layer = flops.per_token * idle * (1 - _kv_share(model))
        layer += flops.per_pair * pairs * idle / step.num_tokens
        products = factor * (products - layer / model.sizes.layers)
        total += products
        cost += products + factor * over.per_call * flops.per_token
        logits = float(step.num_outputs) * model.vocab_size
        cost += over.per_fused_logit * logits * factor / 3.0
        if logits > model.memory.logit_chunk_elements and step.with_grad:
            cost += flops.per_output * step.num_outputs  # projected again
            total += flops.per_output * step.num_outputs
    peak = max(step_bytes(schedule, model), default=0.0)
    return Way("dta", total, cost, peak, schedule.num_blocks)


def _kv_share(model: ModelSizes) -> float:
    """Return the share of a layer's products that make its keys and values."""
    d = model.sizes
    per_layer = model.flops.per_token / (2.0 * d.layers)
    return 2.0 * d.hidden * d.kv_heads * d.head_dim / per_layer


def step_bytes(schedule: Schedule, model: ModelSizes) -> list[float]:
    """Return the peak bytes of each step of a schedule."""
    memory = model.memory
    fragments = schedule.cut.fragments
    path = max((f.path_tokens for f in fragments), default=0)
    graphs: dict[int, float] = {}  # bytes of live graphs, by fragment
    logits_of: dict[int, float] = {}  # that they keep
    trunks = 0
    peaks = []
    for step in schedule.steps:
        fragment = fragments[step.fragment]
        is_exit = step.kind is StepKind.EXIT
        if not is_exit:
            trunks += fragment.num_trunk_tokens
        logits = float(step.num_outputs) * model.vocab_size
        # All logits of a block are kept, or a chunk at a time is held and none kept.
        is_kept = logits <= memory.logit_chunk_elements
        kept = logits * model.element_bytes * is_kept
        chunk = memory.logit_chunk_elements * model.element_bytes * (not is_kept)
        if step.with_grad:
            graph = memory.graph(step.num_tokens, 0)
            idle = memory.graph(step.num_tokens - step.num_outputs, 0)
            graph -= idle / memory.num_layers * (1 - _kv_share(model))
            graphs[step.fragment] = graph + kept
            logits_of[step.fragment] = kept
        held = sum(graphs.values()) + memory.path(path + trunks)
        layer = fragment.num_tokens * memory.graph_bytes / memory.num_layers
        slab = memory.working(0, step.num_outputs) + chunk
        if is_exit:
            # First the head's backward, then the layers', without the logits.
            head = slab + memory.head_gradient(step.num_outputs) * bool(logits)
            layers = 2 * layer + fragment.num_tokens * memory.kv_bytes
            layers -= logits_of.pop(step.fragment, 0.0)
            peaks.append(held + max(head, layers))
            graphs.pop(step.fragment, None)
            trunks -= fragment.num_trunk_tokens if fragment.children else 0
        else:
            peaks.append(held + (slab if logits else layer))
    return peaks
