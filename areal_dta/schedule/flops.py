"""Analytic FLOPs of dense and of tree training: the bound on any speed-up.

Counted: matrix products of the layers, attention over the attended pairs only, and
the vocabulary projection. A backward costs twice its forward. Norms, activations,
softmax and the optimizer are left out, as is usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from areal_dta.schedule.needed_outputs import NeededOutputs
from areal_dta.schedule.schedule import Schedule
from areal_dta.tree import PrefixTree

_BACKWARD = 2  # a backward's products per forward product


@dataclass(frozen=True, slots=True)
class FlopModel:
    """Forward FLOPs of a decoder, in three terms."""

    per_token: float
    """Layers' matrix products, FLOPs a token."""
    per_pair: float
    """Attention, FLOPs a (query token, key token) pair, over all layers."""
    per_output: float
    """Vocabulary projection, FLOPs a position."""

    @classmethod
    def from_config(cls, config: Any, is_critic: bool = False) -> FlopModel:
        """Return the costs of a Llama-like decoder (of a mixture: its active experts).

        Args:
            config: the Hugging Face config.
            is_critic: the model (a critic or a reward model) has a head that gives one
                number per position in place of a vocabulary.

        Raises:
            ValueError: the config lacks a size; the message names it.
        """

        def size(name: str, default: int | None = None) -> int:
            return config_size(config, name, default)

        hidden, layers = size("hidden_size"), size("num_hidden_layers")
        heads = size("num_attention_heads")
        kv_heads = size("num_key_value_heads", heads)
        head_dim = size("head_dim", hidden // heads)
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        num_experts = getattr(config, "num_experts", None) or getattr(
            config, "num_local_experts", None
        )
        if num_experts:
            width = size("moe_intermediate_size", size("intermediate_size"))
            active = size("num_experts_per_tok")
            mlp = 3 * hidden * width * active + hidden * int(num_experts)
        else:
            mlp = 3 * hidden * size("intermediate_size")
        return cls(
            per_token=2.0 * layers * (attention + mlp),
            per_pair=4.0 * layers * heads * head_dim,
            per_output=2.0 * hidden * (1 if is_critic else size("vocab_size")),
        )

    def forward(self, tokens: float, pairs: float, logit_rows: float) -> float:
        return (
            self.per_token * tokens
            + self.per_pair * pairs
            + self.per_output * logit_rows
        )

    def dense(self, lengths: Iterable[int], training: bool = True) -> float:
        """FLOPs of computing each sequence on its own, logits at every position."""
        tokens = pairs = 0
        for n in lengths:
            tokens += n
            pairs += n * (n + 1) // 2
        return self.forward(tokens, pairs, tokens) * (1 + _BACKWARD * training)

    def tree(
        self,
        tree: PrefixTree,
        training: bool = True,
        needed: NeededOutputs | None = None,
    ) -> float:
        """FLOPs of computing what is read once: the least a tree method pays."""
        needed = needed or NeededOutputs.all(tree)
        pairs = sum(
            _pairs(node.start, node.start + num_tokens)
            for node, num_tokens in zip(tree.nodes, needed.computed, strict=True)
        )
        forward = self.forward(needed.num_computed_tokens, pairs, needed.num_outputs)
        return forward * (1 + _BACKWARD * training)

    def schedule(self, schedule: Schedule) -> float:
        """FLOPs of a schedule, recomputation included."""
        segments = schedule.cut.segments
        total = 0.0
        for step in schedule.steps:
            pairs = sum(
                _pairs(segments[s].start, segments[s].end) for s in step.computes
            )
            forward = self.forward(step.num_tokens, pairs, step.num_outputs)
            total += forward * (1 + _BACKWARD * step.with_grad)
        return total

    def bound(
        self,
        tree: PrefixTree,
        training: bool = True,
        needed: NeededOutputs | None = None,
    ) -> float:
        """Dense over tree FLOPs: no tree method can do with fewer.

        1.0 where nothing has to be computed.
        """
        least = self.tree(tree, training, needed)
        return self._dense_of(tree, training) / least if least else 1.0

    def saving(self, tree: PrefixTree, schedule: Schedule) -> float:
        """Dense over scheduled FLOPs: the predicted speed-up.

        1.0 where nothing has to be computed.
        """
        ours = self.schedule(schedule)
        return self._dense_of(tree, schedule.training) / ours if ours else 1.0

    def _dense_of(self, tree: PrefixTree, training: bool) -> float:
        lengths = map(tree.sequence_length, range(tree.num_sequences))
        return self.dense(lengths, training)


def config_size(config: Any, name: str, default: int | None = None) -> int:
    """A size of a Hugging Face config.

    Raises:
        ValueError: neither the config nor ``default`` has it.
    """
    value = getattr(config, name, None) or default
    if value is None:
        raise ValueError(
            f"{type(config).__name__} has no `{name}`, so its cost cannot be "
            "predicted; expected the config of a decoder-only language model"
        )
    return int(value)


def _pairs(start: int, end: int) -> int:
    """Attended pairs of the tokens at depth [start, end): each sees its path."""
    return (end * (end + 1) - start * (start + 1)) // 2
