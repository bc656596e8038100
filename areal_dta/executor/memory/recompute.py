"""MLPs and norms of a block that run again in its backward, attention untouched.

Most of what autograd saves belongs to the MLPs and the norms, which are cheap to run
again: an MLP from the output of its norm, a norm from the residual stream. Queries,
keys, values, attention outputs and residuals stay, so nothing that reads the path runs
twice. Every module of a decoder layer that is beside its attention, or a norm inside
it, is checkpointed by PyTorch for the calls of one block; the model itself is not
changed.

Invariants, and the tests that hold them (tests/executor/test_recompute.py):
  * outputs and gradients have the same bits, for every exact architecture
  * what autograd saves shrinks as schedule/memory.py predicts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from areal_dta.executor.last_layer import decoder_layers
from areal_dta.schedule import PartialGraph
from areal_dta.schedule.flops import FlopModel
from areal_dta.schedule.memory import MemoryModel


class PartRecompute:
    """The modules of a model that can run again in a backward."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [
            module for layer in decoder_layers(model) for module in _beside(layer)
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager for calls of the model that keep part of their graph.

        A module's forward is replaced, not its call, so that hooks run once.
        """
        with ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(_checkpointed(module))
            yield


@contextmanager
def _checkpointed(module: Any) -> Iterator[None]:
    own: Callable[..., Any] | None = vars(module).get("forward")
    # No random numbers: dropout is refused.
    module.forward = partial(
        checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
    )
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _beside(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules without attention whose graph is worth dropping."""
    for child in module.children():
        if any(map(_is_attention, child.modules())):
            yield from _beside(child)
        elif "Norm" in type(child).__name__ or (
            not _is_attention(module) and _saves_more_than_its_input(child)
        ):
            yield child


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module may call attention: some MLPs know their layer, too."""
    name = type(module).__name__.lower()
    is_mlp = any(word in name for word in ("mlp", "moe", "expert", "feedforward"))
    is_mlp = is_mlp and "att" not in name and "layer" not in name
    return hasattr(module, "layer_idx") and not is_mlp


def _saves_more_than_its_input(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear | nn.Embedding):
        return False
    return next(module.parameters(), None) is not None


def partial_graph(sizes: Any, element_bytes: int) -> PartialGraph | None:
    """Return what a partial graph of a model takes and costs, relative to a whole one.

    Args:
        sizes: the model's text config.

    Returns:
        None where the config lacks a size: then it cannot be priced.
    """
    try:
        memory = MemoryModel.from_config(sizes, element_bytes)
        flops = FlopModel.from_config(sizes)
    except ValueError:
        return None
    return PartialGraph(
        size=memory.part_graph_bytes / memory.graph_bytes,
        cost=flops.mlp_per_token / flops.per_token,
    )
