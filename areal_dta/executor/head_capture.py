"""Take the vocabulary projection out of a model's forward, to fuse it with the loss.

During a traversal the output embedding passes its input on, so that the model returns
hidden states as its logits. Models that do more with their logits than project
(scaling, soft-capping, an adapter on the head) are recognised by what they return, and
keep their own projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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
