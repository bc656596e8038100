"""Variants: the ways to compute one gradient that are compared, behind one protocol.

Each stands for systems in use, and each delivers what AReaL's actors need: logprobs
with gradients, and entropies as plain values.

  dense       one sequence at a time
  dense_lean  the same with logits at loss positions only
  dense_ckpt  dense with Hugging Face's activation checkpointing
  leaf        sequences that are a prefix of another are computed with that one
  packed      a whole tree in one call, with a mask (tree attention trainers)
  dfs         one tree node per call, depth first, recomputing (arXiv 2602.00482)
  areal       AReaL's packed trees; with ``--variants`` alone, for it needs areal
  dense_packed  sequences packed as AReaL's FSDP engine does, gradients summed in fp32
  dta_auto    this package with the budgets that `auto` takes, gradients summed in fp32
  dta_alone   each sequence through this package, with nothing shared and all logits:
              what its kernels and scans alone are worth (``--variants`` only)
  dta         this package: fragments, loss positions only
  dta_whole   the same with the last layer run on all tokens
"""

# S = positions, V = vocabulary, E = edges (a position and a token that may follow it)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.schedule import FlopModel, NeededOutputs
from areal_dta.tree import PrefixTree
from bench.workloads import Work

_ENTROPY_ROWS = 1024


@dataclass(frozen=True, slots=True)
class RunCounts:
    num_blocks: int
    """Calls of the model."""
    num_tokens: int
    """Tokens run forward, recomputed ones counted again."""


class Variant:
    """Base of the variants: one whole tree, with outputs at every position."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self._model = name, model
        self._flops = FlopModel.from_config(model.config)

    def run(self, work: Work) -> RunCounts:
        """Add the gradients of all of ``work`` to the model's ``.grad``."""
        raise NotImplementedError

    def sample(self, work: Work, num_sequences: int) -> Work:
        """Return work to measure in place of ``work``; ``work`` if it cannot be cut."""
        return work

    def min_flops(self, work: Work) -> float:
        """Return the FLOPs of computing once all that this variant computes."""
        return self._flops.tree(work.tree)


class PerSequence(Variant):
    """Runs whole sequences, one call each."""

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        checkpointing: bool = False,
        merge_prefixes: bool = False,
        loss_positions_only: bool = False,
    ) -> None:
        super().__init__(name, model)
        self._checkpointing, self._merge_prefixes = checkpointing, merge_prefixes
        self._loss_positions_only = loss_positions_only

    def run(self, work: Work) -> RunCounts:
        groups = self._groups(work)
        with _checkpointing(self._model) if self._checkpointing else nullcontext():
            for group in groups:
                self._train(work, group)
        num_tokens = sum(len(work.tokens[group[0]]) for group in groups)
        return RunCounts(len(groups), num_tokens * (1 + self._checkpointing))

    def _train(self, work: Work, group: list[int]) -> None:
        tokens = work.tokens[group[0]]
        if self._loss_positions_only:
            logprobs, entropy = self._outputs_at_loss(work, group, tokens)
        else:
            rows = torch.arange(len(tokens) - 1, device=tokens.device)
            logits = self._model(input_ids=tokens[None], use_cache=False).logits[0]
            logprobs, entropy = _outputs(logits, rows, tokens[1:])
            del logits
        losses = []
        for i in group:
            n = len(work.tokens[i]) - 1
            losses.append(work.loss(i, logprobs[:n], entropy[:n]))
        torch.stack(losses).sum().backward()

    def _outputs_at_loss(
        self, work: Work, group: list[int], tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [len - 1], 0 where no sequence of the group has loss."""
        is_read = np.zeros(len(tokens) - 1, dtype=bool)
        for i in group:
            is_read[: len(work.positions[i])] |= work.positions[i]
        index = torch.from_numpy(np.flatnonzero(is_read)).to(tokens.device)
        model = self._model
        logits = model(tokens[None], use_cache=False, logits_to_keep=index).logits[0]
        rows = torch.arange(len(index), device=tokens.device)
        found = _outputs(logits, rows, tokens[index + 1])
        logprobs, entropy = (
            x.new_zeros(len(tokens) - 1).index_copy(0, index, x) for x in found
        )
        return logprobs, entropy

    def _groups(self, work: Work) -> list[list[int]]:
        """Group sequences computed together: the longest first, then its prefixes."""
        if not self._merge_prefixes:
            return [[i] for i in range(work.num_sequences)]
        nodes = work.tree.nodes
        waiting: list[int] = []  # they end above the leaf that comes next
        groups = []
        for node in nodes:
            waiting[:0] = node.sequences
            if not node.children:
                groups.append(waiting)
                waiting = []
        return groups

    def sample(self, work: Work, num_sequences: int) -> Work:
        """Choose ``num_sequences`` lengths from the longest to the shortest."""
        groups = self._groups(work)
        if num_sequences >= len(groups):
            return work
        groups.sort(key=lambda group: -len(work.tokens[group[0]]))
        last = len(groups) - 1
        chosen = sorted({round(r) for r in np.linspace(0, last, num_sequences)})
        return work.subset(sorted(i for g in chosen for i in groups[g]))

    def min_flops(self, work: Work) -> float:
        lengths = [len(work.tokens[group[0]]) for group in self._groups(work)]
        if not self._loss_positions_only:
            return self._flops.dense(lengths)
        num_outputs = sum(int(p.sum()) for p in work.positions)
        return self._flops.dense(lengths, num_outputs=num_outputs)


class Alone(PerSequence):
    """The executor on trees of one sequence each, with outputs at every position."""

    def __init__(self, name: str, model: Any, config: ExecutorConfig) -> None:
        super().__init__(name, model)
        self._executor = TreeExecutor(model, config)

    def run(self, work: Work) -> RunCounts:
        num_blocks = num_tokens = 0
        for i, sequence in enumerate(work.workload.sequences):
            tree = PrefixTree.from_sequences([sequence])
            self._executor.forward_backward(
                tree, lambda _, *outputs, i=i: work.loss(i, *outputs)
            )
            stats = self._executor.last_stats
            assert stats is not None
            num_blocks += stats.num_blocks
            num_tokens += stats.num_forward_tokens
        return RunCounts(num_blocks, num_tokens)


class Packed(Variant):
    """Runs a whole tree in one call: depths as positions, ancestors as the mask.

    A workload of several unrelated trees takes one call each.
    """

    def run(self, work: Work) -> RunCounts:
        nodes = work.tree.nodes
        roots = [node.index for node in nodes if node.parent < 0]
        for root, end in zip(roots, [*roots[1:], len(nodes)], strict=True):
            self._train(work, root, end)
        return RunCounts(len(roots), work.tree.num_tree_tokens)

    def _train(self, work: Work, root: int, end: int) -> None:
        nodes = work.tree.nodes[root:end]
        offset = nodes[0].first_token
        device = work.device

        def on_device(arrays: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(device)

        # Mask: in depth-first order, a token's descendants are contiguous.
        num_tokens = sum(node.num_tokens for node in nodes)
        last = {node.index: node.first_token + node.num_tokens for node in nodes}
        for node in reversed(nodes):
            if node.parent >= 0:
                last[node.parent] = max(last[node.parent], last[node.index])
        end_S = on_device(
            [np.full(node.num_tokens, last[node.index] - offset) for node in nodes]
        )
        # Positions, tokens, and for each edge the row that predicts it.
        depth_S = on_device([np.arange(node.start, node.end) for node in nodes])
        tokens_S = on_device([node.tokens for node in nodes])
        parent_S = np.arange(-1, num_tokens - 1)
        for node in nodes[1:]:
            above = work.tree.nodes[node.parent]
            parent_S[node.first_token - offset] = (
                above.first_token + above.num_tokens - 1 - offset
            )
        row_E = torch.from_numpy(parent_S[1:]).to(device)

        logits = self._model(
            input_ids=tokens_S[None],
            position_ids=depth_S[None],
            attention_mask=_ancestor_mask(end_S, self._model.dtype),
            use_cache=False,
        ).logits[0]
        logprob_E, entropy_S = _outputs(logits, row_E, tokens_S[1:])
        del logits
        losses = []
        for i in (i for node in nodes for i in node.sequences):
            index = torch.from_numpy(work.tree.token_indices(i) - offset).to(device)
            losses.append(work.loss(i, logprob_E[index[1:] - 1], entropy_S[index[:-1]]))
        torch.stack(losses).sum().backward()


class Tree(Variant):
    """The executor, with outputs at every position or at loss positions only."""

    def __init__(
        self, name: str, model: Any, config: ExecutorConfig, loss_positions_only: bool
    ) -> None:
        super().__init__(name, model)
        self._executor = TreeExecutor(model, config)
        self._loss_positions_only = loss_positions_only

    def run(self, work: Work) -> RunCounts:
        positions = work.positions if self._loss_positions_only else None
        self._executor.forward_backward(work.tree, work.loss, positions)
        stats = self._executor.last_stats
        assert stats is not None
        return RunCounts(stats.num_blocks, stats.num_forward_tokens)

    def min_flops(self, work: Work) -> float:
        if not self._loss_positions_only:
            return super().min_flops(work)
        return self._flops.tree(
            work.tree, needed=NeededOutputs.logprobs_at(work.tree, work.positions)
        )


def make_variant(name: str, model: Any, budgets: dict[str, Any]) -> Variant:
    """Build the variant called ``name``.

    Args:
        name: one of VARIANTS, ``areal``, or ``dta@BLOCK`` or ``dta@BLOCK/RETAIN`` to
            have several budgets side by side (RETAIN a number or ``all``).
        budgets: arguments of ExecutorConfig for a plain ``dta`` or ``dta_whole``; the
            rest is automatic.

    Raises:
        ValueError: no variant of that name.
    """
    kind, _, spec = name.partition("@")
    if spec and kind == "dta":
        block, _, retain = spec.partition("/")
        budgets = parse_budgets(block, retain or "auto")
    elif name == "areal":
        from bench.areal_packed import ArealPacked

        return ArealPacked(name, model)
    elif name == "dta_alone":
        return Alone(name, model, ExecutorConfig(**budgets))
    elif name in ("dense_packed", "dta_auto"):
        from bench.packed_dense import AutoTree, PackedDense

        return {"dense_packed": PackedDense, "dta_auto": AutoTree}[name](name, model)
    elif spec or kind not in VARIANTS:
        more = "areal", "dense_packed", "dta_alone", "dta_auto"
        known = ", ".join((*VARIANTS, *more))
        raise ValueError(f"variant {name!r}; expected one of {known}")
    if kind in ("dta", "dta_whole"):
        budgets = {**budgets, "whole_last_layer": kind == "dta_whole"}
        return Tree(name, model, ExecutorConfig(**budgets), loss_positions_only=True)
    return VARIANTS[kind](model)


def parse_budgets(block_tokens: str, retain_tokens: str) -> dict[str, Any]:
    """Parse arguments of ExecutorConfig; ``auto`` leaves one to the executor.

    Raises:
        ValueError: neither a number nor a word that is known.
    """
    budgets: dict[str, Any] = {}
    if block_tokens != "auto":
        budgets["block_tokens"] = int(block_tokens)
    if retain_tokens != "auto":
        budgets["retain_tokens"] = (
            None if retain_tokens == "all" else int(retain_tokens)
        )
    return budgets


def _dfs(model: Any) -> Variant:
    # That method holds the logits of a whole node: one chunk, however large.
    config = ExecutorConfig(
        fragments="node", retain_tokens=0, logit_chunk_elements=2**62
    )
    return Tree("dfs", model, config, loss_positions_only=False)


VARIANTS: dict[str, Callable[[Any], Variant]] = {
    "dense": lambda model: PerSequence("dense", model),
    "dense_lean": lambda model: PerSequence(
        "dense_lean", model, loss_positions_only=True
    ),
    "dense_ckpt": lambda model: PerSequence("dense_ckpt", model, checkpointing=True),
    "leaf": lambda model: PerSequence("leaf", model, merge_prefixes=True),
    "packed": lambda model: Packed("packed", model),
    "dfs": _dfs,
    "dta": lambda model: Tree("dta", model, ExecutorConfig(), True),
    "dta_whole": lambda model: Tree(
        "dta_whole", model, ExecutorConfig(whole_last_layer=True), True
    ),
}


@contextmanager
def _checkpointing(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def _outputs(
    logits_SV: Tensor, row_E: Tensor, label_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each label and the entropy of each row (no gradient)."""
    is_double = logits_SV.dtype == torch.float64
    logp_SV = (logits_SV if is_double else logits_SV.float()).log_softmax(-1)
    with torch.no_grad():
        chunks = logp_SV.split(_ENTROPY_ROWS)
        entropy_S = torch.cat([-(c.exp() * c).sum(-1) for c in chunks])
    return logp_SV[row_E, label_E], entropy_S


def _ancestor_mask(end_S: Tensor, dtype: torch.dtype) -> Tensor:
    """Build an additive mask [1, 1, S, S]: 0 where a token sees another, else -inf.

    Additive because sdpa would convert a boolean mask again in every layer.

    Args:
        end_S: exclusive end of each token's subtree.
    """
    at_S = torch.arange(len(end_S), device=end_S.device)
    hidden_SS = at_S[None, :] > at_S[:, None]
    hidden_SS |= at_S[:, None] >= end_S[None, :]
    mask_SS = torch.zeros(hidden_SS.shape, dtype=dtype, device=end_S.device)
    return mask_SS.masked_fill_(hidden_SS, -torch.inf)[None, None]
