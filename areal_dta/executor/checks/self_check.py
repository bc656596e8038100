"""A tiny tree through the real model, against one sequence at a time.

Everything that a model may do is not known in advance, so before the first training
step a tree of a few tens of tokens (a fork, a nested fork, a duplicate, a strict
prefix) runs forward and backward, at two block sizes, and separate sequences through
the model's own attention. Compared are the hidden states that enter each decoder layer,
the loss's gradients with respect to them, and the outputs: so the first layer that
differs has a name. Parameters get no gradients, and nothing of their size is allocated.

Invariants, and the tests that hold them (tests/executor/test_self_check.py): planted
faults are found with their layer; gradients are left as they were; bounded in bytes.
"""

# S = block tokens, T = tree tokens, D = hidden size

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from areal_dta.executor import oracle
from areal_dta.executor.attention import model_attention
from areal_dta.executor.model_support import UnsupportedModelError
from areal_dta.executor.tree_executor import TreeExecutor
from areal_dta.tree import PrefixTree

_BUDGETS = ((5, 0), (64, None))
_LONGEST_WINDOW = 64
"""Longer windows are known from the mask function alone."""
# Relative differences allowed. In half precision two dense evaluations, too, differ by
# several roundings per layer.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 0.06


def check_on_tiny_tree(executor: TreeExecutor) -> None:
    """Compare a tiny tree with its sequences, one at a time.

    Calls the model forward and backward: parameters must be gathered, or all ranks must
    take part.

    Raises:
        UnsupportedModelError: they differ; names the layer, the difference and the
            tolerance.
    """
    model: Any = executor.model
    executor.forward(PrefixTree.from_sequences([[0, 0]]))  # learns the windows
    sequences = _tiny_sequences(executor)
    tree = PrefixTree.from_sequences(sequences)
    dtype = next(model.parameters()).dtype
    dense = _Recorder(model, tree.num_tree_tokens)
    with executor.pace.together():
        _run_dense(executor, sequences, tree, dense)
    tolerance = _TOLERANCES.get(dtype, _HALF_TOLERANCE)
    tolerance = max(tolerance, 4 * dense.spread)
    config = executor.config
    for block_tokens, retain_tokens in _BUDGETS:
        executor.config = dataclasses.replace(
            config,
            block_tokens=block_tokens,
            retain_tokens=retain_tokens,
            router_load=False,
        )
        ours = _Recorder(model, tree.num_tree_tokens)
        try:
            with ours.recording(), executor.head_without_gradient():
                traversal = executor.traverse(tree, _loss, ours)
        finally:
            executor.config = config
        for i in range(len(sequences)):
            ours.outputs[i] = traversal.outputs(i)[:1]
        _compare(model, ours, dense, tolerance, block_tokens)


def _tiny_sequences(executor: TreeExecutor) -> list[list[int]]:
    model: Any = executor.model
    windows = [layer.window for layer in executor.layers.values()]
    short = [w for w in windows if w is not None and w <= _LONGEST_WINDOW]
    length = max([12, *(w + 4 for w in short)])
    rng = np.random.default_rng(0)
    vocab_size = model.config.get_text_config().vocab_size

    def some(count: int) -> list[int]:
        drawn: list[int] = rng.integers(0, vocab_size, count).tolist()
        return drawn

    trunk, branch = some(length), some(4)
    first = trunk + branch + some(5)
    return [
        first,
        trunk + branch + some(3),  # nested fork
        trunk + some(6),  # fork
        first,  # duplicate
        trunk[:-3],  # strict prefix
        some(2),
    ]


def _loss(index: int, outputs: Tensor, entropy: Tensor | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    weight = torch.randn(len(outputs), generator=generator, dtype=torch.float64)
    weight = weight.to(outputs)
    return (outputs * weight).sum()


class _Recorder:
    """Hidden states that enter each layer, per tree token, and their gradients.

    Fulfils `executor.block.BlockWatch`. The output of the input embedding becomes a
    leaf, and the only one that gets a gradient.
    """

    def __init__(self, model: Any, num_tokens: int) -> None:
        self._model, self._num_tokens = model, num_tokens
        self.inputs: list[Tensor] = []
        self.hidden: dict[int, Tensor] = {}
        """Per layer [T, D]."""
        self.grads: dict[int, Tensor] = {}
        self.outputs: dict[int, list[Tensor]] = {}
        self.spread = 0.0
        """Largest relative difference between two sequences at a shared token."""
        self._index_S: Tensor | None = None
        self._layers = _decoder_layers(model)

    @contextmanager
    def block(self, token_S: Tensor) -> Iterator[None]:
        self._index_S = token_S
        try:
            yield
        finally:
            self._index_S = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager for the calls of the model."""
        embeddings = self._model.get_input_embeddings()
        handles = [embeddings.register_forward_hook(self._make_leaf)]
        for index, layer in enumerate(self._layers):
            handles.append(
                layer.register_forward_pre_hook(self._watch(index), with_kwargs=True)
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.inputs = []

    def _make_leaf(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaf = output.detach()
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            self.inputs.append(leaf)
        return leaf

    def _watch(self, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._index_S is None:
                return
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            index_S = self._index_S
            state = hidden.detach().float() if hidden.element_size() < 4 else hidden
            state = state.detach().reshape(len(index_S), -1)
            if layer not in self.hidden:
                self.hidden[layer] = state.new_zeros(self._num_tokens, state.shape[1])
                self.grads[layer] = torch.zeros_like(self.hidden[layer])
            before = self.hidden[layer][index_S]
            is_known = before.any(1)
            if bool(is_known.any()):
                self.spread = max(
                    self.spread, _relative(state[is_known], before[is_known])
                )
            self.hidden[layer][index_S] = state
            if hidden.requires_grad:
                total = self.grads[layer]

                def add(grad: Tensor) -> None:
                    flat = grad.reshape(len(index_S), -1).to(total)
                    total.index_add_(0, index_S, flat)

                hidden.register_hook(add)

        return hook


def _run_dense(
    executor: TreeExecutor,
    sequences: list[list[int]],
    tree: PrefixTree,
    record: _Recorder,
) -> None:
    """Run each sequence through the model's own attention, forward and backward."""
    model: Any = executor.model
    is_critic = executor.outputs == "values"
    temperature = executor.config.temperature
    device = next(model.parameters()).device
    with (
        torch.enable_grad(),
        model_attention(model, "eager"),
        record.recording(),
    ):
        for i, sequence in enumerate(sequences):
            index_S = torch.from_numpy(tree.token_indices(i)).to(device)
            with record.block(index_S):
                if is_critic:
                    output = oracle.value_output(model, sequence).values
                else:
                    found = oracle.sequence_output(model, sequence, temperature)
                    output = found.logprobs
            torch.autograd.backward(_loss(i, output), inputs=record.inputs)
            record.inputs.clear()
            record.outputs[i] = [output.detach()]


def _compare(
    model: Any, ours: _Recorder, dense: _Recorder, tolerance: float, block: int
) -> None:
    def refuse(where: str, what: str, difference: float) -> None:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives another result on a prefix tree than on "
            f"single sequences: {where}: {what} differ by {difference:.1e} (relative; "
            f"allowed {tolerance:.1e}) on a tree of {len(ours.hidden[0])} tokens in "
            f"blocks of {block}; use the dense engine (actor.backend=fsdp:…), or "
            "actor.dta.self_check=false to train all the same"
        )

    def name(layer: int) -> str:
        if layer < 0:
            return "the embedding or the positions"
        return f"layer {layer} ({type(ours._layers[layer]).__name__})"

    # forward: the first layer whose output differs
    num_layers = len(ours.hidden)
    for layer in range(num_layers):
        difference = _relative(ours.hidden[layer], dense.hidden[layer])
        if not difference <= tolerance:
            refuse(name(layer - 1), "its hidden states", difference)
    got = torch.cat([x for i in dense.outputs for x in ours.outputs[i]])
    want = torch.cat([x for i in dense.outputs for x in dense.outputs[i]])
    difference = _relative(got, want)
    if not difference <= tolerance:
        refuse(f"{name(num_layers - 1)} or the head", "its outputs", difference)
    # backward: the last layer whose input's gradient differs
    for layer in reversed(range(num_layers)):
        difference = _relative(ours.grads[layer], dense.grads[layer])
        if not difference <= tolerance:
            refuse(name(layer), "its gradients", difference)


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: the longest list of modules with attention inside."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    with_attention = [
        list(m)
        for m in lists
        if all(any(hasattr(x, "layer_idx") for x in layer.modules()) for layer in m)
    ]
    return max(with_attention, key=len, default=[])
