"""Bytes of activations and keys/values that a schedule will hold, from sizes alone.

Counted for a Llama-like decoder run eagerly by Transformers, whose norms work in fp32:
what autograd saves for the backward, layer by layer; the path buffer and the trunks
with their fp32 gradient accumulators; and what one block needs in passing. Parameters,
their gradients and the optimizer are not per token and not counted.

It is a prediction: tests/executor/test_budget.py holds it to counted bytes, and
`executor.memory_budget` replaces the largest term by a measured one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from areal_dta.schedule.flops import config_size
from areal_dta.schedule.schedule import Schedule

_FP32 = 4
# Values of a logit held while a slab is in work, beside the logit itself, which counts
# with the graph: log-softmax, softmax and one product of them.
_VALUES_PER_LOGIT = 3
# Gradients in flight of one layer, in units of what the layer saves.
_BACKWARD_LAYERS = 2


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What a token costs, in bytes."""

    graph_bytes: float
    """A token of a live autograd graph, over all layers, its K/V included."""
    kv_bytes: float
    """K/V of a token over all layers, in the compute dtype."""
    kv_grad_bytes: float
    """The gradient accumulators of the same."""
    num_layers: int
    hidden_bytes: float
    """One hidden state."""
    vocab_size: int
    element_bytes: int
    """Of the compute dtype."""
    logit_chunk_elements: int = 2**25
    logit_slab_elements: int = 2**25
    """Logits whose softmax is taken at once."""

    @classmethod
    def from_config(
        cls,
        config: Any,
        element_bytes: int,
        logit_chunk_elements: int = 2**25,
        logit_slab_elements: int = 2**25,
    ) -> MemoryModel:
        """From the Hugging Face config of a Llama-like decoder.

        Args:
            element_bytes: of the compute dtype: 2, 4 or 8.

        Raises:
            ValueError: the config lacks a size; the message names it.
        """
        e, acc = element_bytes, max(element_bytes, _FP32)
        hidden = config_size(config, "hidden_size")
        layers = config_size(config, "num_hidden_layers")
        heads = config_size(config, "num_attention_heads")
        kv_heads = config_size(config, "num_key_value_heads", heads)
        head_dim = config_size(config, "head_dim", hidden // heads)
        num_experts = getattr(config, "num_experts", None) or getattr(
            config, "num_local_experts", None
        )
        # input in fp32, normed, scaled; twice a layer
        norms = 2 * hidden * (_FP32 + 2 * e)
        queries, keys = heads * head_dim, kv_heads * head_dim
        # q, k, v; the output, and again with heads side by side; log-sum-exp
        attention = e * (queries + 2 * keys) + 2 * e * queries + acc * heads
        if "qwen3" in str(getattr(config, "model_type", "")):  # norms of q and k
            attention += (_FP32 + e) * (queries + keys)
        if num_experts:
            width = config_size(
                config,
                "moe_intermediate_size",
                config_size(config, "intermediate_size"),
            )
            active = config_size(config, "num_experts_per_tok")
            mlp = active * e * (4 * width + 3 * hidden) + 2 * acc * int(num_experts)
        else:  # gate, its activation, up, their product
            mlp = 4 * e * config_size(config, "intermediate_size")
        return cls(
            graph_bytes=float(layers * (norms + attention + mlp)),
            kv_bytes=2.0 * layers * keys * e,
            kv_grad_bytes=2.0 * layers * keys * acc,
            num_layers=layers,
            hidden_bytes=float(hidden * e),
            vocab_size=config_size(config, "vocab_size"),
            element_bytes=e,
            logit_chunk_elements=logit_chunk_elements,
            logit_slab_elements=logit_slab_elements,
        )

    def calibrated(self, graph_bytes: float) -> MemoryModel:
        """With the bytes a token of a graph that were measured."""
        return dataclasses.replace(self, graph_bytes=graph_bytes)

    def path(self, num_tokens: float, training: bool = True) -> float:
        """Bytes of K/V and their accumulators, of the path buffer or of trunks."""
        return num_tokens * (self.kv_bytes + self.kv_grad_bytes * training)

    def graph(self, num_tokens: float, num_outputs: float) -> float:
        """Bytes of live graphs. A block whose rows fit one chunk keeps its logits."""
        return num_tokens * self.graph_bytes + num_outputs * (
            self.hidden_bytes + self.vocab_size * self.element_bytes
        )

    def working(
        self, block_tokens: int, num_outputs: int, training: bool = True
    ) -> float:
        """Bytes that one block needs in passing, beside its graph."""
        logits = min(
            num_outputs * self.vocab_size,
            max(self.logit_chunk_elements, self.vocab_size),
        )
        slab = min(logits, max(self.logit_slab_elements, self.vocab_size))
        scaled = _FP32 * (self.element_bytes < _FP32)  # half precision makes a copy
        head = slab * (max(self.element_bytes, _FP32) * _VALUES_PER_LOGIT + scaled)
        if not training:  # else they count with the graph
            head += logits * self.element_bytes
        layers = block_tokens * self.graph_bytes / self.num_layers
        if training:  # gradients of a layer, and of the fragment's own K/V
            layers = _BACKWARD_LAYERS * layers + block_tokens * self.kv_bytes
        mask = block_tokens**2 * (1 + self.element_bytes)
        return head + layers + mask

    def schedule(self, schedule: Schedule) -> float:
        """Peak bytes of a traversal, its three parts taken at their worst."""
        cut, training = schedule.cut, schedule.training
        block = max((s.num_tokens for s in schedule.steps), default=0)
        rows = max((s.num_outputs for s in schedule.steps), default=0)
        # rows are spread over the graph as over the tree
        per_token = cut.needed.num_outputs / max(1, cut.needed.num_computed_tokens)
        graph_rows = max(rows * training, per_token * schedule.peak_graph_tokens)
        return (
            self.path(schedule.peak_kv_tokens, training)
            + self.graph(schedule.peak_graph_tokens, graph_rows)
            + self.working(block, rows, training)
        )
