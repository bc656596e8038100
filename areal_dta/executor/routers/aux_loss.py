"""Load-balancing loss of routers, each sequence on its own, on a tree.

Transformers' ``load_balancing_loss_func`` on one sequence of n tokens in a model of l
layers with e experts is

    aux = e * sum over experts of (count / (n l)) * (probability / (n l)),

with the number of times that an expert is among the chosen and the sum of its
probabilities, over all tokens and layers. It is no sum over tokens: the gradient of a
token's probabilities needs the counts of the whole sequence. Counts have none, and
depth-first order has counted all of a sequence before the first of its tokens is taken
backward. So the gradient of the probabilities of a tree token is

    sum over the sequences through it of weight * e * counts / (n l)^2,

the same in each layer, and is injected at the routers' outputs like that of a loss.

The probabilities are the softmax of what Transformers records as router logits, which
in version 5.3 most routers have put through a softmax before.

Invariants (tests/executor/test_router_aux_loss.py): loss and gradients equal those of
one sequence at a time, for any budgets; the loss is linear in the weights.
"""

# S = block tokens, T = tree tokens, N = nodes, E = experts, K = experts per token

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from areal_dta.executor.kernels import accumulation_dtype
from areal_dta.executor.routers.load import is_router, outputs_of
from areal_dta.tree import PrefixTree


class _Watch(Protocol):
    inputs: list[Tensor] | None

    def block(self, token_S: Tensor) -> AbstractContextManager[None]: ...


class RouterAuxLoss:
    """The auxiliary loss of one traversal; all tokens of the tree must be computed.

    Args:
        weights: per sequence, the factor of its loss.
        inner: looks on as well.

    Raises:
        ValueError: the model's routers or its loss are not those that are known.
    """

    def __init__(
        self,
        model: Any,
        tree: PrefixTree,
        weights: Sequence[float],
        inner: _Watch | None = None,
    ) -> None:
        self._routers = find_routers(model)
        self._inner = inner
        self.inputs = None if inner is None else inner.inputs
        self._num_experts = self._routers[0].num_experts
        self._top_k = self._routers[0].top_k
        self._seen: list[Tensor] = []
        parameter = next(model.parameters())
        device, acc = parameter.device, accumulation_dtype(parameter.dtype)

        # The nodes of each sequence, in one copy to the device.
        sequences = range(tree.num_sequences)
        paths = [tree.path(i) for i in sequences]
        flat = torch.tensor([n for p in paths for n in p], dtype=torch.int64)
        self._paths = flat.to(device).split([len(p) for p in paths])
        sizes = [tree.sequence_length(i) * len(self._routers) for i in sequences]
        self._factors = [
            w * self._num_experts / size**2
            for w, size in zip(weights, sizes, strict=True)
        ]
        lengths = np.array([node.num_tokens for node in tree.nodes], np.int64)
        node_T = np.repeat(np.arange(len(lengths)), lengths)
        self._node_T = torch.from_numpy(node_T).to(device)
        self._is_counted_T = torch.zeros_like(self._node_T, dtype=torch.bool)
        shape = len(tree.nodes), self._num_experts
        self._counts_NE = torch.zeros(shape, dtype=torch.int64, device=device)
        self._grad_NE = torch.zeros(shape, dtype=acc, device=device)
        self._value = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def value(self) -> float:
        """The weighted sum of all sequences' losses; waits for the device."""
        return float(self._value)

    @contextmanager
    def block(self, token_S: Tensor) -> Iterator[None]:
        """Context manager for the model's run on these tree tokens."""
        inner = nullcontext() if self._inner is None else self._inner.block(token_S)
        with inner, outputs_of(self._routers) as found:
            yield
        self._seen = [_logits(found[i]) for i in range(len(self._routers))]
        # Tokens that are computed again do not count.
        is_new_S = ~self._is_counted_T[token_S]
        self._is_counted_T[token_S] = True
        for logits_SE in self._seen:
            prob_SE = logits_SE.detach().softmax(-1)
            choice_SK = prob_SE.topk(self._top_k, dim=-1).indices
            at_SK = self._node_T[token_S, None] * self._num_experts + choice_SK
            is_new_SK = is_new_S[:, None].expand_as(at_SK).to(torch.int64)
            self._counts_NE.view(-1).index_add_(0, at_SK.flatten(), is_new_SK.flatten())

    def take(self) -> list[Tensor]:
        """Return what the routers of the last block gave, [S, E] per layer."""
        seen, self._seen = self._seen, []
        return seen

    def end(self, sequences: Sequence[int]) -> None:
        """File the gradient of sequences of which all tokens have been counted."""
        for s in sequences:
            counts_E = self._counts_NE[self._paths[s]].sum(0)
            grad_E = counts_E.to(self._grad_NE.dtype) * self._factors[s]
            self._grad_NE.index_add_(
                0, self._paths[s], grad_E.expand(len(self._paths[s]), -1)
            )

    def gradients(self, token_S: Tensor, logits: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of a block's router logits; adds up the loss.

        To be called once per block, when all sequences through it have ended.
        """
        grad_SE = self._grad_NE[self._node_T[token_S]]
        found = []
        for logits_SE in logits:
            prob_SE = logits_SE.detach().to(grad_SE.dtype).softmax(-1)
            term_SE = prob_SE * grad_SE
            total_S1 = term_SE.sum(-1, keepdim=True)
            self._value += total_S1.sum(dtype=torch.float64)
            found.append((term_SE - prob_SE * total_S1).to(logits_SE.dtype))
        return found


def find_routers(model: nn.Module) -> list[Any]:
    """Return the routers whose outputs Transformers records for its auxiliary loss.

    Raises:
        ValueError: there are none, or their loss is another than that of this module.
    """
    name = type(model).__name__.removeprefix("FSDP")
    recorded = [
        getattr(module, "_can_record_outputs", None) or {} for module in model.modules()
    ]
    recorders = [of["router_logits"] for of in recorded if "router_logits" in of]
    found: list[Any] = []
    for recorder in recorders[:1]:
        target: Any = getattr(recorder, "target_class", recorder)
        place = getattr(recorder, "layer_name", None) or ""
        if isinstance(target, type) and getattr(recorder, "index", 0) == 0:
            found = [
                module
                for path, module in model.named_modules()
                if is_router(module) and isinstance(module, target) and place in path
            ]
    if not found:
        raise ValueError(
            f"router_aux_loss: {name} has no routers with `num_experts` and `top_k` "
            "whose logits Transformers records; set actor.dta.router_aux_loss=0"
        )
    sizes = {(router.num_experts, router.top_k) for router in found}
    if len(sizes) > 1 or not _has_known_loss(model, *next(iter(sizes))):
        raise ValueError(
            f"router_aux_loss: {name} has another auxiliary loss than Transformers' "
            "load_balancing_loss_func, or layers with different numbers of experts; "
            "set actor.dta.router_aux_loss=0"
        )
    return found


def _logits(output: Any) -> Tensor:
    logits: Tensor = output[0] if isinstance(output, tuple | list) else output
    return logits


def _has_known_loss(model: nn.Module, num_experts: int, top_k: int) -> bool:
    """Return whether the model's own function gives what this module computes."""
    base: Any = model
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    homes = [vars(sys.modules[cls.__module__]) for cls in type(base).__mro__]
    functions = [home.get("load_balancing_loss_func") for home in homes]
    function = next((found for found in functions if found is not None), None)
    if function is None:
        return False
    generator = torch.Generator().manual_seed(0)
    logits = tuple(
        torch.randn(5, num_experts, generator=generator, device="cpu") for _ in range(2)
    )
    prob_TE = torch.cat(logits).softmax(-1)
    chosen = prob_TE.topk(top_k, dim=-1).indices.flatten()
    count_E = torch.bincount(chosen, minlength=num_experts)
    products = float((count_E * prob_TE.sum(0)).sum())
    expected = num_experts * products / len(prob_TE) ** 2
    got = float(function(logits, num_experts, top_k))
    return abs(got - expected) < 1e-4 * expected
