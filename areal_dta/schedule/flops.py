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
        config = text_config(config)
        d = DecoderSizes.from_config(config)
        attention = d.hidden * d.head_dim * (2 * d.heads + 2 * d.kv_heads)
        mixing = d.attention_layers * attention + d.state_products
        mlp = 3 * d.hidden * d.intermediate * d.active_experts + d.hidden * d.experts
        vocab_size = 1 if is_critic else config_size(config, "vocab_size")
        return cls(
            per_token=2.0 * (mixing + d.layers * mlp),
            per_pair=4.0 * d.attention_layers * d.heads * d.head_dim,
            per_output=2.0 * d.hidden * vocab_size,
            mlp_per_token=2.0 * d.layers * mlp,
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


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Sizes of a Llama-like decoder that costs depend on."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    experts: int
    """0 without a mixture."""
    active_experts: int
    """Experts per token; 1 without a mixture."""
    attention_layers: int
    """Those that attend: all but the layers that carry a state."""
    state_products: int
    """Multiplications per token of the other layers, all together."""

    @classmethod
    def from_config(cls, config: Any) -> DecoderSizes:
        """Read a Hugging Face config. Raises as ``config_size``."""
        config = text_config(config)

        def size(name: str, default: int | None = None) -> int:
            return config_size(config, name, default)

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        name = "num_experts" if getattr(config, "num_experts", None) else None
        name = name or "num_local_experts"
        experts = size(name) if getattr(config, name, None) else 0
        width = size("intermediate_size")
        types = getattr(config, "layer_types", None) or []
        num_linear = types.count("linear_attention")
        num_convolutions = types.count("conv")
        products = num_convolutions * 4 * hidden**2  # projections to 3 parts, and back
        if num_linear:
            keys = size("linear_num_key_heads") * size("linear_key_head_dim")
            value_heads = size("linear_num_value_heads")
            values = value_heads * size("linear_value_head_dim")
            # projections (the gate as wide as the values), and the state read twice
            # and written once
            projections = hidden * (2 * keys + 3 * values + 2 * value_heads)
            state = 3 * values * size("linear_key_head_dim")
            products += num_linear * (projections + state)
        return cls(
            hidden=hidden,
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", hidden // heads),
            intermediate=size("moe_intermediate_size", width) if experts else width,
            experts=experts,
            active_experts=size("num_experts_per_tok") if experts else 1,
            attention_layers=size("num_hidden_layers") - num_linear - num_convolutions,
            state_products=products,
        )


def text_config(config: Any) -> Any:
    """Return the part of a (possibly multimodal) Hugging Face config about text."""
    return getattr(config, "get_text_config", lambda: config)()


def config_size(config: Any, name: str, default: int | None = None) -> int:
    """Return a size of a Hugging Face config.

    Raises:
        ValueError: neither the config nor ``default`` has it, or it differs by layer.
    """
    value = getattr(config, name, None) or default
    if value is None:
        raise ValueError(
            f"{type(config).__name__} has no `{name}`, so its cost cannot be "
            "predicted; expected the config of a decoder-only language model"
        )
    if not isinstance(value, int):
        raise ValueError(
            f"{type(config).__name__}.{name}={value!r:.60}, so its cost cannot be "
            "predicted; expected one number for all layers"
        )
    return value
