"""Analytic FLOPs of dense and of tree training: the bound on any speed-up.

Counted: matrix products of the layers, attention over the attended pairs only, the
convolutions and states of layers that carry a state (token by token: chunks of a scan
take more), and the vocabulary projection. A backward costs twice its forward. Norms,
activations, softmax and the optimizer are left out, as is usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from areal_dta.schedule.decoder_sizes import DecoderSizes, config_size, text_config
from areal_dta.schedule.needed_outputs import NeededOutputs
from areal_dta.schedule.schedule import Schedule
from areal_dta.tree import PrefixTree
from areal_dta.tree.prefix_tree import attended_pairs

_BACKWARD = 2  # a backward's products per forward product


@dataclass(frozen=True, slots=True)
class FlopModel:
    """Forward FLOPs of a decoder, in three terms."""

    per_token: float
    """Matrix products of the layers, FLOPs per token."""
    per_pair: float
    """Attention over all layers, FLOPs per (query, key) pair."""
    per_output: float
    """Vocabulary projection, FLOPs per position."""
    mlp_per_token: float = 0.0
    """The part of ``per_token`` that a partial graph runs again."""
    scan_per_token: float = 0.0
    """The part of ``per_token`` in scans, which also run on what pads a segment."""

    @classmethod
    def from_config(cls, config: Any, is_critic: bool = False) -> FlopModel:
        """Return the costs of a decoder (of a mixture: its active experts).

        Args:
            config: the Hugging Face config.
            is_critic: the model (a critic or a reward model) has a head that gives one
                number per position in place of a vocabulary.

        Raises:
            ValueError: the config lacks a size; the message names it.
        """
        config = text_config(config)
        d = DecoderSizes.from_config(config)
        mixing = d.attention_products + d.state_products
        vocab_size = 1 if is_critic else config_size(config, "vocab_size")
        return cls(
            per_token=2.0 * (mixing + d.mlp_products),
            per_pair=4.0 * d.attention_layers * d.heads * d.head_dim,
            per_output=2.0 * d.hidden * vocab_size,
            mlp_per_token=2.0 * d.mlp_products,
            scan_per_token=2.0 * d.scan_products,
        )

    def forward(self, tokens: float, pairs: float, outputs: float) -> float:
        return (
            self.per_token * tokens + self.per_pair * pairs + self.per_output * outputs
        )

    def dense(
        self,
        lengths: Iterable[int],
        training: bool = True,
        num_outputs: int | None = None,
    ) -> float:
        """Return the FLOPs of each sequence alone.

        Args:
            num_outputs: positions with logits, over all sequences; None: every one.
        """
        tokens = pairs = 0
        for n in lengths:
            tokens += n
            pairs += attended_pairs(0, n)
        outputs = tokens if num_outputs is None else num_outputs
        return self.forward(tokens, pairs, outputs) * (1 + _BACKWARD * training)

    def tree(
        self,
        tree: PrefixTree,
        training: bool = True,
        needed: NeededOutputs | None = None,
    ) -> float:
        """Return the FLOPs of computing each needed token once, the minimum."""
        needed = needed or NeededOutputs.all(tree)
        pairs = sum(
            attended_pairs(node.start, node.start + num_tokens)
            for node, num_tokens in zip(tree.nodes, needed.computed, strict=True)
        )
        forward = self.forward(needed.num_computed_tokens, pairs, needed.num_outputs)
        return forward * (1 + _BACKWARD * training)

    def schedule(self, schedule: Schedule) -> float:
        """Return the FLOPs of a schedule, recomputation included."""
        segments = schedule.cut.segments
        total = 0.0
        for step in schedule.steps:
            pairs = sum(
                attended_pairs(segments[s].start, segments[s].end)
                for s in step.computes
            )
            forward = self.forward(step.num_tokens, pairs, step.num_outputs)
            total += forward * (1 + _BACKWARD * step.with_grad)
            total += self.mlp_per_token * step.num_tokens * step.keeps_part
        return total

    def saving(self, tree: PrefixTree, schedule: Schedule) -> float:
        """Return dense over scheduled FLOPs: the predicted speed-up.

        1.0 where nothing has to be computed.
        """
        lengths = map(tree.sequence_length, range(tree.num_sequences))
        ours = self.schedule(schedule)
        return self.dense(lengths, schedule.training) / ours if ours else 1.0
