"""What a block gives: logprobs and entropies, or values.

A *channel* holds one scalar per edge (predicted token) or per position (row). A
sequence sees its part of each channel; a shared edge or row is computed once.

Logprobs are fused with the vocabulary projection (fused_logprobs.py), which is taken
out of the model's forward for that: during a block the output embedding passes its
input on, so that the model returns hidden states as its logits. Models that do more
with their logits than project (scaling, soft-capping) are recognised by what they
return, and heads that are more than `nn.Linear` (adapters, hooks, a forward of their
own) by what they are: both keep their own projection.

Invariants, and the tests that hold them (tests/executor):
  * only needed outputs are projected; the head is given back: test_needed_outputs.py
  * values equal the oracle's: test_scopes.py
"""

# S = block tokens, R = rows, E = edges, V = vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_dta.executor.config import ExecutorConfig
from areal_dta.executor.fused_logprobs import (
    Labels,
    fused_token_logprobs,
    token_logprobs,
)
from areal_dta.executor.kernels import accumulation_dtype
from areal_dta.executor.layout.block_layout import BlockLayout

ModelCall = Callable[..., Tensor]
"""Runs the block with further keyword arguments; returns its logits [1, ...]."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One kind of output, filed under tree tokens."""

    name: str
    on_edges: bool
    """Filed under the token that is predicted; otherwise under the position."""
    span: slice
    """The part of a sequence's tokens that has an entry: logprobs from the second on,
    entropies all but the last, values everywhere."""


class OutputHead(Protocol):
    trains: bool
    """Whether the vocabulary's projection gets a gradient."""

    @property
    def channels(self) -> tuple[Channel, ...]: ...

    def outputs(
        self, call: ModelCall, layout: BlockLayout, arrays: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """Run the block; return per channel [E] or [R], fp32 (fp64 for fp64).

        Args:
            arrays: `BlockLayout.arrays` on the device.
        """
        ...


class HeadCapture:
    """The output embedding of a model, which can be made to pass its input on."""

    def __init__(self, model: nn.Module) -> None:
        self._head = getattr(model, "get_output_embeddings", lambda: None)()
        self._does_more = False
        self._hidden: Tensor | None = None

    @property
    def head(self) -> nn.Linear | None:
        """The head, if it does nothing but project; None: call it as it is."""
        is_plain = not self._does_more and _only_projects(self._head)
        return self._head if is_plain else None

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Context manager in which the head returns its input."""
        head: Any = self.head
        assert head is not None

        def pass_on(hidden: Tensor) -> Tensor:
            self._hidden = hidden
            return hidden

        head.forward = pass_on
        try:
            yield
        finally:
            self._hidden = None
            del head.forward

    def take(self, logits: Tensor) -> Tensor | None:
        """Return the hidden states, if ``logits`` are nothing else.

        Otherwise the model does more with its logits than project: return None, and
        keep its own projection from now on.
        """
        hidden, self._hidden = self._hidden, None
        if hidden is not None and logits is not hidden:
            same = logits.shape == hidden.shape and torch.equal(
                logits.detach().to(hidden.dtype), hidden.detach()
            )
            hidden = hidden if same else None
        if hidden is None:
            self._does_more = True
        return hidden


def _only_projects(head: Any) -> bool:
    """Return whether a module does what `nn.Linear` does: its class's forward is that
    of `nn.Linear` (FSDP makes a subclass), with no forward or hooks of its own."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    hooks = [*head._forward_pre_hooks.values(), *head._forward_hooks.values()]
    is_fsdp = [
        getattr(hook, "__module__", "").startswith("torch.distributed")
        for hook in hooks
    ]
    return "forward" not in vars(head) and all(is_fsdp)


class LogprobHead:
    """Logprob of each edge and entropy of each row, of a causal language model."""

    channels = (
        Channel("logprobs", on_edges=True, span=slice(1, None)),
        Channel("entropy", on_edges=False, span=slice(None, -1)),
    )

    def __init__(self, model: PreTrainedModel, config: ExecutorConfig) -> None:
        self.capture, self._config = HeadCapture(model), config
        self.trains = True

    def outputs(
        self, call: ModelCall, layout: BlockLayout, arrays: Mapping[str, Tensor]
    ) -> list[Tensor]:
        num_rows = len(layout.row_R)
        edges_before = np.searchsorted(layout.edge_row_E, np.arange(num_rows + 1))
        labels = Labels(
            row_E=arrays["edge_row"],
            label_E=arrays["label"],
            edges_before_row=tuple(edges_before.tolist()),
        )
        config, head = self._config, self.capture.head
        if head is not None:
            with self.capture.bypassed():  # all hidden states: they exist anyway
                hidden = self.capture.take(call(logits_to_keep=0))
            if hidden is not None:
                weight: Tensor = head.weight
                bias: Tensor | None = head.bias
                if not self.trains:
                    weight = weight.detach()
                    bias = None if bias is None else bias.detach()
                logprobs_and_entropy = fused_token_logprobs(
                    _rows(hidden[0], layout, arrays),
                    weight,
                    bias,
                    labels,
                    config.temperature,
                    config.logit_chunk_elements,
                )
                return list(logprobs_and_entropy)
        # A block may be there for its K/V alone: project one row, use none.
        to_keep = arrays["row"] if num_rows else 1
        logits_RV = call(logits_to_keep=to_keep)[0, :num_rows]
        return list(token_logprobs(logits_RV, labels, config.temperature))


class ValueHead:
    """One scalar per position, of a model with a single label per token: a critic's
    value, or a reward model's score at the last token."""

    channels = (Channel("values", on_edges=False, span=slice(None)),)
    trains = True

    def outputs(
        self, call: ModelCall, layout: BlockLayout, arrays: Mapping[str, Tensor]
    ) -> list[Tensor]:
        values_S1 = call()[0]
        if values_S1.shape[-1] != 1:
            raise ValueError(
                f"the model gives {values_S1.shape[-1]} scalars per token; expected "
                "one: a token-classification model with num_labels=1"
            )
        acc = accumulation_dtype(values_S1.dtype)
        return [_rows(values_S1[:, 0], layout, arrays).to(acc)]


def _rows(x_S: Tensor, layout: BlockLayout, arrays: Mapping[str, Tensor]) -> Tensor:
    """Select the rows of [S, ...]. They are unique: ``index_select`` knows that its
    backward only adds, where that of ``x[rows]`` would sort them."""
    num_rows = len(layout.row_R)
    if num_rows in (0, len(x_S)):
        return x_S[:num_rows]
    return x_S.index_select(0, arrays["row"])


def make_head(kind: str, model: PreTrainedModel, config: ExecutorConfig) -> OutputHead:
    """Return the head for ``logprobs`` or ``values``.

    Raises:
        ValueError: another kind.
    """
    if kind == "logprobs":
        return LogprobHead(model, config)
    if kind == "values":
        return ValueHead()
    raise ValueError(f"outputs={kind!r}; expected logprobs or values")
