"""Take the vocabulary projection out of a model's forward, to fuse it with the loss.

During a traversal the output embedding passes its input on, so that the model returns
hidden states as its logits. Models that do more with their logits than project
(scaling, soft-capping, an adapter on the head) are recognised by what they return, and
keep their own projection.

What is read from a model: logprobs and entropies, or values.

A *channel* is one number a predicted token (an edge of the tree) or a position (a row).
A sequence sees its part of each channel; a shared edge or row is computed once.
"""

# S = block tokens, R = rows, E = edges, V = vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_dta.executor.block_layout import BlockLayout, TreeTensors
from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.fused_logprobs import (
    Labels,
    fused_token_logprobs,
    token_logprobs,
)
from areal_dta.executor.kernels import accumulation_dtype


class HeadCapture:
    """The output embedding of a model, with its forward out of the way on demand."""

    def __init__(self, model: nn.Module) -> None:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        # FSDP makes a subclass of nn.Linear; adapters wrap or replace it.
        is_plain = isinstance(head, nn.Linear) and "Linear" in type(head).__name__
        self._head: nn.Linear | None = head if is_plain else None
        self._hidden: Tensor | None = None

    @property
    def is_usable(self) -> bool:
        return self._head is not None

    @property
    def weight(self) -> Tensor:
        assert self._head is not None
        return self._head.weight

    @property
    def bias(self) -> Tensor | None:
        assert self._head is not None
        return self._head.bias

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """The head returns its input; undone at the end."""
        assert self._head is not None
        head: Any = self._head

        def pass_on(hidden: Tensor) -> Tensor:
            self._hidden = hidden
            return hidden

        had_own = "forward" in vars(head)
        previous = head.forward
        head.forward = pass_on
        try:
            yield
        finally:
            self._hidden = None
            if had_own:
                head.forward = previous
            else:
                del head.forward

    def take(self, logits: Tensor) -> Tensor | None:
        """The hidden states, if ``logits`` are nothing else; None otherwise, and for
        all later calls: then the model does more with its logits than project."""
        hidden, self._hidden = self._hidden, None
        if hidden is not None and logits is not hidden:
            same = logits.shape == hidden.shape and torch.equal(
                logits.detach().to(hidden.dtype), hidden.detach()
            )
            hidden = hidden if same else None
        if hidden is None:
            self._head = None
        return hidden


ModelCall = Callable[..., Tensor]
"""Runs the block with further keyword arguments; returns its logits [1, ...]."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One kind of output, filed under tree tokens."""

    name: str
    on_edges: bool
    """Filed under the token that is predicted; otherwise under the position."""
    span: slice
    """Which of a sequence's tokens it is read at: logprobs from the second on,
    entropies but for the last, values everywhere."""


class OutputHead(Protocol):
    @property
    def channels(self) -> tuple[Channel, ...]: ...

    def outputs(
        self, call: ModelCall, layout: BlockLayout, tensors: TreeTensors
    ) -> list[Tensor]:
        """Run the block; one tensor a channel, [E] or [R], fp32 (fp64 for fp64)."""
        ...


class LogprobHead:
    """Logprob of each edge and entropy of each row, of a causal language model."""

    channels = (
        Channel("logprobs", on_edges=True, span=slice(1, None)),
        Channel("entropy", on_edges=False, span=slice(None, -1)),
    )

    def __init__(self, model: PreTrainedModel, config: ExecutorConfig) -> None:
        self._capture, self._config = HeadCapture(model), config

    def outputs(
        self, call: ModelCall, layout: BlockLayout, tensors: TreeTensors
    ) -> list[Tensor]:
        device, num_rows = tensors.tokens.device, len(layout.row_R)

        def on_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        edges_before = np.searchsorted(layout.edge_row_E, np.arange(num_rows + 1))
        labels = Labels(
            row_E=on_device(layout.edge_row_E),
            label_E=tensors.tokens[on_device(layout.edge_token_E)],
            edges_before_row=tuple(edges_before.tolist()),
        )
        # a block may be there for its K/V alone: project one row, read none
        to_keep = on_device(layout.row_R) if num_rows else 1
        temperature = self._config.temperature
        if self._capture.is_usable:
            with self._capture.bypassed():
                hidden = self._capture.take(call(logits_to_keep=to_keep))
            if hidden is not None:
                return list(
                    fused_token_logprobs(
                        hidden[0, :num_rows],
                        self._capture.weight,
                        self._capture.bias,
                        labels,
                        temperature,
                        self._config.logit_chunk_elements,
                    )
                )
        logits_RV = call(logits_to_keep=to_keep)[0, :num_rows]
        return list(token_logprobs(logits_RV, labels, temperature))


class ValueHead:
    """One number a position, of a model with a single label a token: a critic's
    value, or a reward model's score at the last token."""

    channels = (Channel("values", on_edges=False, span=slice(None)),)

    def outputs(
        self, call: ModelCall, layout: BlockLayout, tensors: TreeTensors
    ) -> list[Tensor]:
        values_S1 = call()[0]
        if values_S1.shape[-1] != 1:
            raise ValueError(
                f"the model gives {values_S1.shape[-1]} numbers a token; expected one: "
                "a token-classification model with num_labels=1"
            )
        row_R = torch.from_numpy(layout.row_R).to(values_S1.device)
        acc = accumulation_dtype(values_S1.dtype)
        return [values_S1[row_R, 0].to(acc)]


def make_head(kind: str, model: PreTrainedModel, config: ExecutorConfig) -> OutputHead:
    """``logprobs`` or ``values``.

    Raises:
        ValueError: another kind.
    """
    if kind == "logprobs":
        return LogprobHead(model, config)
    if kind == "values":
        return ValueHead()
    raise ValueError(f"outputs={kind!r}; expected logprobs or values")
