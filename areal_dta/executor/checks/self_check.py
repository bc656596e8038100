"""A tiny tree through the real model, against one sequence at a time.

What a model may do is not known in advance. So before the first training step a tree of
a few tens of tokens (forks, a duplicate, a strict prefix) runs forward and backward, at
two block sizes, and its sequences one by one through the model's own eager attention.

Compared per token are the hidden states that enter each decoder layer, the gradients of
a loss with respect to them, and the outputs. Each layer starts from what the dense run
found, in both directions: so differences do not add up over the depth, and the layer
that differs has a name. Parameters get no gradients.

Memory: two tensors [layers + 1, T, hidden size], and the graph of one sequence.

Invariants, and the tests that hold them (tests/executor/test_self_check.py): correct
models pass in fp64, fp32 and bf16; faults put in by hand are found with their layer;
gradients are left as they were, and nothing of the size of a weight is allocated.
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
from areal_dta.executor.kernels import accumulation_dtype
from areal_dta.executor.last_layer import decoder_layers
from areal_dta.executor.model_refusals import UnsupportedModelError, class_name
from areal_dta.executor.routers import is_router
from areal_dta.executor.traversal import Traversal
from areal_dta.executor.tree_executor import TreeExecutor
from areal_dta.tree import PrefixTree

_BUDGETS = ((5, 0), (64, None))
_LONGEST_WINDOW = 64
"""Longer windows are known from the mask function alone (attention_profile.py)."""
# Relative, of a layer that starts from the same input; 5 times and more what correct
# models differ by. In fp64 that is 1e-7, because eager attention takes its softmax, and
# most norms their square, in fp32. In fp32 it is 4e-7; in bf16 1.4 eps.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_HALF_TOLERANCE = 8
"""Tolerance for bf16 and fp16, in units of the dtype's eps."""
_ROUTED_SHARE = 1 / 8
"""Share of the tokens, those that differ most, that is left out in half precision where
a router chooses experts: nearly equal ones are taken the other way after a rounding.
Gradients, which such a token changes at others too, then get 4 times the tolerance."""


def check_on_tiny_tree(executor: TreeExecutor) -> None:
    """Compare a tiny tree with its sequences, one at a time. Collective where the
    executor's pace is.

    Raises:
        UnsupportedModelError: they differ; names the layer, what differs, by how much,
            the tolerance and the remedy.
    """
    model: Any = executor.model
    device = next(model.parameters()).device
    cuda = [device] if device.type == "cuda" else []
    config = executor.config
    problems: list[str] = []
    with torch.random.fork_rng(devices=cuda):
        executor.profile(find_randomness=model.training)
        sequences = _tiny_sequences(executor)
        tree = PrefixTree.from_sequences(sequences)
        dense = _Record(model, tree.num_tree_tokens)
        with executor.pace.together():
            outputs = _run_dense(executor, sequences, tree, dense)
        try:
            for block_tokens, retain_tokens in _BUDGETS:
                executor.config = dataclasses.replace(
                    config,
                    block_tokens=block_tokens,
                    retain_tokens=retain_tokens,
                    router_load=False,
                )
                watch = _Comparison(dense)
                with watch.recording(), executor.head_without_gradient():
                    traversal = executor.traverse(tree, _loss, watch)
                problem = (
                    watch.forward_problem()
                    or _output_problem(traversal, outputs, watch.tolerance)
                    or watch.backward_problem()
                )
                if problem:
                    problems.append(f"{problem} in blocks of {block_tokens} tokens")
        finally:
            executor.config = config
    if problems:  # only now: other ranks may be taking part in the calls
        raise UnsupportedModelError(
            f"{class_name(model)} gives another result on a prefix tree than on "
            f"single sequences: {problems[0]}; use the dense engine "
            "(actor.backend=fsdp:…) for this model, or actor.dta.self_check=false to "
            "train it all the same"
        )


def _tiny_sequences(executor: TreeExecutor) -> list[list[int]]:
    """Return sequences whose shared prefix is longer than any short window."""
    model: Any = executor.model
    config = model.config.get_text_config()
    windows = [layer.window for layer in executor.layers.values()]
    short = [w for w in windows if w is not None and w <= _LONGEST_WINDOW]
    rng = np.random.default_rng(0)

    def some(count: int) -> list[int]:
        drawn: list[int] = rng.integers(0, config.vocab_size, count).tolist()
        return drawn

    trunk, branch = some(max([12, *(w + 4 for w in short)])), some(4)
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
    return (outputs * weight.to(outputs)).sum()


def _run_dense(
    executor: TreeExecutor,
    sequences: list[list[int]],
    tree: PrefixTree,
    record: _Record,
) -> list[Tensor]:
    """Run each sequence through the model's own attention, forward and backward."""
    model: Any = executor.model
    device = next(model.parameters()).device
    outputs = []
    with torch.enable_grad(), model_attention(model, "eager"), record.recording():
        for i, sequence in enumerate(sequences):
            index_S = torch.from_numpy(tree.token_indices(i)).to(device)
            with record.block(index_S):
                if executor.outputs == "values":
                    output = oracle.value_output(model, sequence).values
                else:
                    output = oracle.sequence_output(
                        model, sequence, executor.config.temperature
                    ).logprobs
            torch.autograd.backward(_loss(i, output), inputs=record.inputs)
            record.inputs.clear()
            outputs.append(output.detach())
    return outputs


class _Record:
    """What enters each layer, per tree token, and the gradients with respect to it.

    The first sequence through a token sets its state; later ones start from it. The
    output of the input embedding becomes a leaf, and the only one that gets a gradient.
    Fulfils `executor.block.BlockWatch`.
    """

    def __init__(self, model: Any, num_tokens: int) -> None:
        self.model = model
        self.layers = decoder_layers(model)
        self.inputs: Any = []
        self.states: dict[int, Tensor] = {}
        """States [T, D] per layer; the last entry is what the last layer gives."""
        self.grads: dict[int, Tensor] = {}
        device = next(model.parameters()).device
        self.is_known_T = torch.zeros(num_tokens, dtype=torch.bool, device=device)
        self._index_S: Tensor | None = None

    @contextmanager
    def block(self, token_S: Tensor) -> Iterator[None]:
        self._index_S = token_S
        try:
            yield
        finally:
            self._index_S = None
            self.is_known_T[token_S] = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager for the calls of the model."""
        embeddings = self.model.get_input_embeddings()
        handles = [embeddings.register_forward_hook(self._make_leaf)]
        for index, layer in enumerate(self.layers):
            hook = self._entering(index)
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        for layer in self.layers[-1:]:
            handles.append(layer.register_forward_hook(self._leaving(len(self.layers))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.inputs.clear()

    def file(self, layer: int, index_S: Tensor, state_SD: Tensor) -> Tensor:
        """Take note of states; return those to go on with."""
        if layer not in self.states:
            shape = len(self.is_known_T), state_SD.shape[1]
            self.states[layer] = state_SD.new_zeros(shape)
            acc = accumulation_dtype(state_SD.dtype)
            self.grads[layer] = state_SD.new_zeros(shape, dtype=acc)
        is_new_S = ~self.is_known_T[index_S]
        self.states[layer][index_S[is_new_S]] = state_SD[is_new_S]
        return self.states[layer][index_S]

    def file_grad(self, layer: int, index_S: Tensor, grad_SD: Tensor) -> Tensor:
        """Take note of gradients; return those to go on with."""
        total_TD = self.grads[layer]
        total_TD.index_add_(0, index_S, grad_SD.to(total_TD.dtype))
        return grad_SD

    def _make_leaf(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if self._index_S is None or not torch.is_grad_enabled():
            return None
        self.inputs.append(output.detach().requires_grad_())
        return self.inputs[-1]

    def _entering(self, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._index_S is None:
                return None
            if args:
                return (self._through(layer, args[0]), *args[1:]), kwargs
            hidden = self._through(layer, kwargs["hidden_states"])
            return args, {**kwargs, "hidden_states": hidden}

        return hook

    def _leaving(self, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if self._index_S is None:
                return None
            if isinstance(output, Tensor):
                return self._through(layer, output)
            return type(output)([self._through(layer, output[0]), *output[1:]])

        return hook

    def _through(self, layer: int, hidden: Tensor) -> Tensor:
        """File hidden states [..., S, D] and their gradient; return their like."""
        index_S = self._index_S
        assert index_S is not None
        moved = hidden.movedim(-2, 0)

        def back(flat_SD: Tensor) -> Tensor:
            return flat_SD.to(hidden.dtype).view(moved.shape).movedim(0, -2)

        with torch.no_grad():
            state = back(self.file(layer, index_S, moved.detach().flatten(1)))
        # Adapters make the embedding's output require grad even where none is taken.
        if not (hidden.requires_grad and torch.is_grad_enabled()):
            return state
        # the value of `state` with the graph of `hidden`
        replaced = hidden - hidden.detach() + state

        def file_grad(grad: Tensor) -> Tensor:
            return back(self.file_grad(layer, index_S, grad.movedim(-2, 0).flatten(1)))

        replaced.register_hook(file_grad)
        return replaced


class _Comparison(_Record):
    """Differences of blocks from a dense record, by layer and token."""

    def __init__(self, dense: _Record) -> None:
        super().__init__(dense.model, len(dense.is_known_T))
        self._dense = dense
        # What layers compute in may be coarser than a parameter, or finer.
        dtypes = {x.dtype for x in [*dense.states.values(), *dense.model.parameters()]}
        self.tolerance = max(map(_tolerance, dtypes))
        is_routed = any(map(is_router, dense.model.modules()))
        is_routed &= self.tolerance > max(_TOLERANCES.values())
        self._share = 1 - _ROUTED_SHARE * is_routed
        self._grad_tolerance = self.tolerance * (4 if is_routed else 1)
        num_tokens = len(dense.is_known_T)
        self._state_error = {n: x.new_zeros(num_tokens) for n, x in dense.grads.items()}
        # A gradient that never comes differs by all of it.
        self._grad_error = {
            n: x.norm(dim=1) / _rms(x.norm(dim=1)) for n, x in dense.grads.items()
        }

    def file(self, layer: int, index_S: Tensor, state_SD: Tensor) -> Tensor:
        want_SD = self._dense.states[layer][index_S]
        acc = self._dense.grads[layer].dtype
        error_S = (state_SD.to(acc) - want_SD.to(acc)).norm(dim=1)
        error_S /= want_SD.to(acc).norm(dim=1).clamp_min(1e-30)
        self._state_error[layer][index_S] = error_S
        return want_SD

    def file_grad(self, layer: int, index_S: Tensor, grad_SD: Tensor) -> Tensor:
        want_TD = self._dense.grads[layer]
        error_S = (grad_SD.to(want_TD.dtype) - want_TD[index_S]).norm(dim=1)
        scale = _rms(want_TD.norm(dim=1))
        self._grad_error[layer][index_S] = error_S / scale
        return want_TD[index_S]

    def forward_problem(self) -> str | None:
        """Return the first layer whose result differs."""
        for layer, error_T in sorted(self._state_error.items()):
            error = self._total(error_T)
            if not error <= self.tolerance:
                what = f"hidden states of {self._name(layer - 1)}"
                return _difference(what, error, self.tolerance)
        return None

    def backward_problem(self) -> str | None:
        """Return the last layer whose gradient differs."""
        for layer, error_T in sorted(self._grad_error.items(), reverse=True):
            error = self._total(error_T)
            if not error <= self._grad_tolerance:
                what = f"gradients of {self._name(layer)}"
                return _difference(what, error, self._grad_tolerance)
        return None

    def _total(self, error_T: Tensor) -> float:
        # Tokens that no output depends on, the last ones of sequences, do not run.
        error = error_T[self.is_known_T].sort().values
        return float(_rms(error[: round(self._share * len(error))]))

    def _name(self, layer: int) -> str:
        if layer < 0:
            return "the embedding"
        if layer == len(self.layers):
            return "the head"
        name = class_name(self.layers[layer])
        return f"layer {layer} ({name})"


def _output_problem(
    traversal: Traversal, dense: list[Tensor], tolerance: float
) -> str | None:
    got = torch.cat([traversal.outputs(i)[0] for i in range(len(dense))])
    want = torch.cat(dense)
    error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    if error <= tolerance:
        return None
    name = traversal.channels[0].channel.name
    return _difference(f"{name} of the head", error, tolerance)


def _difference(what: str, error: float, tolerance: float) -> str:
    return f"the {what} differ by {error:.1e} (relative; tolerance {tolerance:.1e})"


def _tolerance(dtype: torch.dtype) -> float:
    if dtype not in (torch.float16, torch.bfloat16):  # quantized weights, for example
        return _TOLERANCES.get(dtype, 0.0)
    return _HALF_TOLERANCE * torch.finfo(dtype).eps


def _rms(error: Tensor) -> Tensor:
    return error.square().mean().sqrt().clamp_min(1e-30)
