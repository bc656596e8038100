"""Tokens of each expert, counted as separate sequences would count them.

A tree token stands for all sequences through it, so its choice of experts counts that
many times. The counts are for reading only; aux_loss.py has the loss that balances
them. Held by tests/executor/test_router_load.py.
"""

# S = block tokens, T = tree tokens, K = experts per token

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from areal_dta.tree import PrefixTree


class RouterLoad:
    """Counts of one traversal, by a hook on each router.

    Tokens that are not computed (no needed output depends on them) are not counted.

    Raises:
        ValueError: the model has no router that is known.
    """

    inputs: list[Tensor] | None = None

    def __init__(self, model: nn.Module, tree: PrefixTree) -> None:
        self._routers: list[Any] = [m for m in model.modules() if is_router(m)]
        if not self._routers:
            raise ValueError(
                f"router_load: {type(model).__name__} has no router with `num_experts` "
                "and `top_k`; expected a mixture-of-experts model of Transformers"
            )
        device = next(model.parameters()).device
        self._weight_T = torch.from_numpy(_sequences_through(tree)).to(device)
        self._is_counted_T = torch.zeros_like(self._weight_T, dtype=torch.bool)
        self._counts = [
            torch.zeros(router.num_experts, dtype=torch.int64, device=device)
            for router in self._routers
        ]

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """One count per expert, for each layer with experts, first to last."""
        return tuple(tuple(count.tolist()) for count in self._counts)

    @contextmanager
    def block(self, token_S: Tensor) -> Iterator[None]:
        """Context manager for the model's run on these tree tokens.

        Its last call counts; tokens that are computed again do not.
        """
        weight_S = self._weight_T[token_S] * ~self._is_counted_T[token_S]
        with outputs_of(self._routers) as found:
            yield
        for index, output in found.items():
            choice_SK = _choice(output)
            weight_SK = weight_S[:, None].expand_as(choice_SK)
            self._counts[index].index_add_(0, choice_SK.flatten(), weight_SK.flatten())
        self._is_counted_T[token_S] = True


@contextmanager
def outputs_of(modules: Sequence[nn.Module]) -> Iterator[dict[int, Any]]:
    """Context manager that files what each module returns, by its place in the list.

    Of several calls the last counts.
    """
    found: dict[int, Any] = {}

    def file_under(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found[index] = output

        return hook

    handles = [m.register_forward_hook(file_under(i)) for i, m in enumerate(modules)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def is_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router") and all(
        isinstance(getattr(module, name, None), int)
        for name in ("num_experts", "top_k")
    )


def _choice(output: Any) -> Tensor:
    """Return the chosen experts [S, K]: a router's only integers."""
    parts = output if isinstance(output, tuple | list) else [output]
    for part in parts:
        if isinstance(part, Tensor) and part.dtype == torch.int64:
            return part
    kinds = [type(part).__name__ for part in parts]
    raise ValueError(f"router_load: a router returned {kinds} without its choice")


def _sequences_through(tree: PrefixTree) -> np.ndarray:
    """Return per tree token, depth first, the number of sequences through it."""
    through = [len(node.sequences) for node in tree.nodes]
    for node in reversed(tree.nodes):  # children before parents
        if node.parent >= 0:
            through[node.parent] += through[node.index]
    lengths = [node.num_tokens for node in tree.nodes]
    return np.repeat(np.array(through, np.int64), lengths)
