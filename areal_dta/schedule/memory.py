"""Bytes of activations and K/V that a traversal will hold, from sizes alone.

Counted for a Llama-like decoder run eagerly by Transformers, whose norms work in fp32:
  * what autograd saves for the backward, layer by layer;
  * the KV cache of the path and the open trunks, with fp32 gradient accumulators;
  * what one block needs temporarily.
Parameters, their gradients and the optimizer do not depend on tokens and are left out.

This is a prediction: tests/executor compares it with counted bytes, and
``executor.memory.budget`` replaces the largest term by a measured one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from areal_dta.schedule.decoder_sizes import DecoderSizes, config_size

_FP32 = 4
# Values held per logit of the current slab: log-softmax, softmax and one product of
# them. The logit itself counts with the graph.
_VALUES_PER_LOGIT = 3
# Scores, weights, their gradients, and one more while they are multiplied.
_SCORE_PRODUCTS = 5
# Gradients in flight of one layer, in units of what the layer saves.
_BACKWARD_LAYERS = 2


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes per token of what a traversal holds."""

    graph_bytes: float
    """Bytes per token of a live autograd graph, over all layers, its K/V included."""
    part_graph_bytes: float
    """The same without MLPs and norms, whose inputs are kept."""
    kv_bytes: float
    """K/V per token over all layers, in the compute dtype."""
    kv_grad_bytes: float
    """Gradient accumulators of the K/V, per token."""
    num_layers: int
    hidden_bytes: float
    """One hidden state."""
    vocab_size: int
    element_bytes: int
    """Bytes per element of the compute dtype."""
    logit_chunk_elements: int = 2**25
    logit_slab_elements: int = 2**25
    """Logits whose softmax is computed at once."""
    num_heads: int = 1
    state_bytes: float = 0.0
    """Bytes per attach point of the layers that carry a state, over all of them."""
    state_grad_bytes: float = 0.0
    """Their gradients: the accumulators, and those of the child that is open."""
    head_dim: int = 0
    max_scores: int = 0
    """Attention scores held at once, where scores are held at all; 0: nowhere."""

    @classmethod
    def from_config(
        cls,
        config: Any,
        element_bytes: int,
        logit_chunk_elements: int = 2**25,
        logit_slab_elements: int = 2**25,
    ) -> MemoryModel:
        """Count the bytes of a Llama-like decoder from its Hugging Face config.

        Args:
            element_bytes: bytes per element of the compute dtype: 2, 4 or 8.

        Raises:
            ValueError: the config lacks a size; the message names it.
        """
        d = DecoderSizes.from_config(config)
        e, acc = element_bytes, max(element_bytes, _FP32)
        # The input in fp32, normed, scaled; twice per layer.
        norms = 2 * d.hidden * (_FP32 + 2 * e)
        queries, keys = d.heads * d.head_dim, d.kv_heads * d.head_dim
        # q, k, v; the output, and again with its heads side by side; log-sum-exp.
        attention = e * (queries + 2 * keys) + 2 * e * queries + acc * d.heads
        part = attention + 4 * e * d.hidden  # input and output of two norms
        if "qwen3" in str(getattr(config, "model_type", "")):  # norms of q and k
            attention += (_FP32 + e) * (queries + keys)
            part += e * (queries + keys)
        if d.experts:
            mlp = d.active_experts * e * (4 * d.intermediate + 3 * d.hidden)
            mlp += 2 * acc * d.experts
        else:  # gate, its activation, up, their product
            mlp = 4 * e * d.intermediate
        return cls(
            graph_bytes=float(d.layers * (norms + attention + mlp)),
            part_graph_bytes=float(d.layers * part),
            kv_bytes=2.0 * d.attention_layers * keys * e,
            kv_grad_bytes=2.0 * d.attention_layers * keys * acc,
            num_layers=d.layers,
            hidden_bytes=float(d.hidden * e),
            vocab_size=config_size(config, "vocab_size"),
            element_bytes=e,
            logit_chunk_elements=logit_chunk_elements,
            logit_slab_elements=logit_slab_elements,
            num_heads=d.heads,
            head_dim=d.head_dim,
        )

    def with_one_output(self) -> MemoryModel:
        """Return this for kernels whose output has its heads side by side already."""
        copy = self.element_bytes * self.num_layers * self.num_heads * self.head_dim
        return dataclasses.replace(
            self,
            graph_bytes=self.graph_bytes - copy,
            part_graph_bytes=self.part_graph_bytes - copy,
        )

    def path(self, num_tokens: float, training: bool = True) -> float:
        """Return the bytes of K/V and accumulators of a path or of trunks."""
        return num_tokens * (self.kv_bytes + self.kv_grad_bytes * training)

    def states(self, num_points: float, training: bool = True) -> float:
        """Return the bytes of the states at open attach points."""
        return num_points * (self.state_bytes + self.state_grad_bytes * training)

    def scores(self, block_tokens: int, path_tokens: int) -> float:
        """Return the bytes of one layer's scores behind a path, where they are held:
        five products of their size, and K/V with gradients in fp32."""
        if not self.max_scores:
            return 0.0
        num_keys = path_tokens + block_tokens
        num_scores = min(self.max_scores, self.num_heads * block_tokens * num_keys)
        acc = max(self.element_bytes, _FP32)
        kv = 2 * num_keys * self.kv_grad_bytes / self.num_layers
        return _SCORE_PRODUCTS * acc * num_scores + kv

    def graph(
        self,
        num_tokens: float,
        num_outputs: float,
        is_part: bool = False,
        block_outputs: float | None = None,
    ) -> float:
        """Return the bytes of live graphs, with the logits that they keep.

        Args:
            is_part: they are graphs without MLPs and norms.
            block_outputs: outputs per block, by default all: a block whose logits come
                in several chunks keeps none of them.
        """
        graph_bytes = self.part_graph_bytes if is_part else self.graph_bytes
        per_block = num_outputs if block_outputs is None else block_outputs
        has_chunks = per_block * self.vocab_size > self.logit_chunk_elements
        logits = 0 if has_chunks else self.vocab_size * self.element_bytes
        return num_tokens * graph_bytes + num_outputs * (self.hidden_bytes + logits)

    def head_gradient(self, num_outputs: int) -> float:
        """Return the bytes of the gradient of the vocabulary's projection while a block
        computes it: all of it, or a part per chunk of logits and their sum in fp32."""
        weight = self.vocab_size * self.hidden_bytes / self.element_bytes
        has_chunks = num_outputs * self.vocab_size > self.logit_chunk_elements
        total = max(self.element_bytes, _FP32) * has_chunks
        return weight * (self.element_bytes + total)

    def working(
        self, block_tokens: int, num_outputs: int, training: bool = False
    ) -> float:
        """Return the bytes that one block needs temporarily, beside its graph: for the
        head, and when that is done, for a layer.

        Args:
            training: with the gradient of the vocabulary's projection.
        """
        logits = min(
            num_outputs * self.vocab_size,
            max(self.logit_chunk_elements, self.vocab_size),
        )
        slab = min(logits, max(self.logit_slab_elements, self.vocab_size))
        scaled = _FP32 * (self.element_bytes < _FP32)  # half precision makes a copy
        per_logit = max(self.element_bytes, _FP32) * _VALUES_PER_LOGIT + scaled
        head = float(slab * per_logit)
        head += self.head_gradient(num_outputs) if training else 0
        # gradients of a layer, and of the fragment's own K/V; a partial graph's MLP
        # runs again for them
        layers = block_tokens * self.graph_bytes / self.num_layers
        layers = _BACKWARD_LAYERS * layers + block_tokens * self.kv_bytes
        mask = block_tokens**2 * (1 + self.element_bytes)
        return max(head, layers) + mask if training else head + layers + mask
