"""The last decoder layer at needed outputs only.

Nobody reads what the last layer makes of a token without a needed output, except the
token's keys and values. So what lies behind its attention (output projection, MLP,
norms) runs on the needed rows alone. No architecture is touched for that: the layer's
own forward runs twice. The first time on the whole block, and it ends where attention
has its result; the second time on the rows, and attention gives it their part of that
result. The queries, keys and values of the second run are not used by anything, so
they cost one projection of few rows and no backward.

Invariants, and the tests that hold them (tests/executor/test_last_layer.py):
  * outputs and gradients are those of the whole layer, for every exact architecture
  * a model for which this does not hold runs its whole last layer
"""

# S = block tokens, R = rows, N = query heads, H = head dim

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from areal_dta.executor.checks.multimodal import text_modules

MAX_SHARE = 0.75
"""Rows per token of a block above which the whole layer is run: what is saved no longer
pays for projecting the rows twice."""


class AttentionDoneError(Exception):
    """Ends the last layer's first run; caught by `LastLayer`."""


@dataclass(slots=True)
class NeededRows:
    """What the attention of the last layer does in a block of which rows are needed."""

    layer_idx: int
    row_R: Tensor
    out: Tensor | None = None
    """Attention [1, S, N, H] of the whole block, once the first run has it."""

    def end_first_run(self, out: Tensor) -> None:
        """Keep the attention of the whole block.

        Raises:
            AttentionDoneError: always.
        """
        self.out = out
        raise AttentionDoneError


class LastLayer:
    """The last decoder layer of a model.

    Args:
        layer: the module whose forward takes the hidden states [1, S, D] first.
        layer_idx: the index by which its attention goes.
    """

    def __init__(self, layer: nn.Module, layer_idx: int) -> None:
        self._layer, self._layer_idx = layer, layer_idx
        self.ran_rows = False
        """Whether it has ever run on rows alone: a layer without attention does not."""

    @contextmanager
    def at_rows(self, row_R: Tensor) -> Iterator[NeededRows]:
        """Context manager in which the layer returns these rows, [1, R, D].

        The layer's forward is replaced, not its call, so that whatever surrounds the
        call (hooks that gather parameters) happens once.
        """
        layer: Any = self._layer
        rows = NeededRows(self._layer_idx, row_R)
        own = vars(layer).get("forward")
        layer.forward = self._forward_at_rows(layer.forward, rows)
        try:
            yield rows
        finally:
            del layer.forward
            if own is not None:
                layer.forward = own
            rows.out = None

    def _forward_at_rows(self, forward: Callable[..., Any], rows: NeededRows) -> Any:
        def forward_at_rows(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            try:
                # A layer without attention does not end early: it has run whole.
                return forward(*args, **kwargs)
            except AttentionDoneError:
                pass
            num_tokens = hidden.shape[1]

            def select(x: Any) -> Any:
                """Select the rows of whatever has an entry per token of the block."""
                if isinstance(x, Tensor) and x.shape[:2] == (1, num_tokens):
                    return x.index_select(1, rows.row_R)
                if isinstance(x, Tensor) and x.shape == (num_tokens,):
                    return x.index_select(0, rows.row_R)
                return x

            args, kwargs = tree_map(select, (args, kwargs))
            self.ran_rows = True
            return forward(*args, **kwargs)

        return forward_at_rows


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: the longest list of modules with attention inside."""
    lists = [
        list(module)
        for module in text_modules(model).values()
        if isinstance(module, nn.ModuleList)
        and all(any(hasattr(m, "layer_idx") for m in x.modules()) for x in module)
    ]
    return max(lists, key=len, default=[])


def find_last_layer(
    model: nn.Module,
    num_layers: int,
    outputs: Callable[[LastLayer | None], list[Tensor]],
) -> LastLayer | None:
    """Return the last layer, if running it on rows gives what running it whole does.

    Args:
        outputs: runs a short block with few needed outputs, the last layer given on
            their rows alone, and returns them.
    """
    layers = decoder_layers(model)
    if len(layers) != num_layers:
        return None
    found = LastLayer(layers[-1], num_layers - 1)
    whole = outputs(None)
    try:
        rows = outputs(found)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError):
        return None  # something in the layer has another idea of its tokens
    # Rounding alone may differ.
    tolerance = 64 * torch.finfo(next(model.parameters()).dtype).eps
    is_same = all(
        x.shape == y.shape and bool((x - y).norm() <= tolerance * y.norm())
        for x, y in zip(rows, whole, strict=True)
    )
    return found if is_same and found.ran_rows else None
