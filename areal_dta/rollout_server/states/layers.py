"""Gated DeltaNet and short convolutions, run on rows and pieces with their states.

Transformers' own cache is not used: a forward of several tokens behind a cached state
starts from no state in version 5.3, silently, and a packed call carries one sequence's
state into the next. The layers' convolution and scan are replaced for the length of a
call instead, as the executor does for training; projections run on all tokens at once.

Invariant (tests/rollout_server/test_states.py): tokens and logprobs equal those of a
whole forward over each sequence, whatever else is in the batch.
"""

# R = rows, T = tokens of the step, C = channels, W = kernel width, H = heads,
# D = head dim

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from areal_dta.executor.checks.state_layers import layers_with_state
from areal_dta.executor.model_refusals import UnsupportedModelError, class_name
from areal_dta.rollout_server.states.step import StepStates

_DELTA = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule", "conv1d", "A_log")


def state_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that carry a state.

    Raises:
        UnsupportedModelError: there are some of another kind than those of this module.
    """
    layers = layers_with_state(model)
    for path, layer in layers.items():
        if not (_is_delta(layer) or _is_short_convolution(layer)):
            raise UnsupportedModelError(
                f"{class_name(model)}: {path} ({class_name(layer)}) carries a state "
                "that the embedded server cannot keep; use rollout.backend=sglang"
            )
    return list(layers.values())


@contextmanager
def carrying(layers: list[nn.Module], step: StepStates) -> Iterator[None]:
    """Context manager for one call of the model on a step.

    Raises:
        UnsupportedModelError: a layer did not run its convolution and its scan once.
    """
    changed: list[tuple[nn.Module, str, Any]] = []

    def replace(module: nn.Module, name: str, function: Any) -> None:
        changed.append((module, name, vars(module).get(name)))
        object.__setattr__(module, name, function)

    expected = {}
    for index, layer in enumerate(layers):
        expected[index, "tail"] = 1
        if _is_delta(layer):
            expected[index, "matrix"] = 1
            replace(layer, "causal_conv1d_fn", partial(_delta_conv, layer, index, step))
            scan = partial(
                _delta_scan, layer, index, step, layer.chunk_gated_delta_rule
            )
            replace(layer, "chunk_gated_delta_rule", scan)
        else:
            conv: Any = layer.conv
            replace(conv, "forward", partial(_convolve, conv, index, step))
    try:
        yield
    finally:
        for module, name, before in reversed(changed):
            if before is None and name == "forward":
                object.__delattr__(module, name)
            else:
                object.__setattr__(module, name, before)
    if step.num_calls != expected:
        raise UnsupportedModelError(
            "a layer with a state did not run its convolution and its scan once each: "
            "kernels that cannot be replaced; use rollout.backend=sglang"
        )


def _is_delta(module: nn.Module) -> bool:
    return class_name(module).endswith("GatedDeltaNet") and all(
        hasattr(module, name) for name in _DELTA
    )


def _is_short_convolution(module: nn.Module) -> bool:
    conv = getattr(module, "conv", None)
    return class_name(module).endswith("ShortConv") and isinstance(conv, nn.Conv1d)


def _convolve(
    conv: nn.Conv1d,
    index: int,
    step: StepStates,
    x_1CT: Tensor,
    activation: str | None = None,
) -> Tensor:
    """Convolve rows and pieces behind their last W - 1 inputs; returns [1, C, T]."""
    width = conv.weight.shape[-1]

    def run(where: slice, tail: Tensor, is_rows: bool) -> tuple[Tensor, Tensor]:
        new = x_1CT[:, :, where]
        joined = torch.cat([tail, new.transpose(0, 2) if is_rows else new], -1)
        out = F.conv1d(joined, conv.weight, conv.bias, groups=conv.groups)
        left = joined[..., joined.shape[-1] - (width - 1) :]
        return out.transpose(0, 2) if is_rows else out, left

    zero = x_1CT.new_zeros(1, x_1CT.shape[1], width - 1)
    out_1CT = step.run((index, "tail"), zero, run, dim=2)
    return out_1CT if activation is None else ACT2FN[activation](out_1CT)


def _delta_conv(
    layer: Any, index: int, step: StepStates, x: Tensor, activation: str, **_: Any
) -> Tensor:
    return _convolve(layer.conv1d, index, step, x, activation)


def _delta_scan(
    layer: Any,
    index: int,
    step: StepStates,
    chunk_rule: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, None]:
    """Scan rows and pieces from their states; query, key, value [1, T, H, D]."""
    assert initial_state is None and not output_final_state

    def run(where: slice, state: Tensor, is_rows: bool) -> tuple[Tensor, Tensor]:
        tensors = [x[:, where] for x in (query, key, value, g, beta)]
        rule = chunk_rule
        if is_rows:  # a batch of sequences of one token
            tensors = [x.transpose(0, 1) for x in tensors]
            rule = layer.recurrent_gated_delta_rule
        q, k, v, decay, rate = tensors
        out, left = rule(
            q,
            k,
            v,
            g=decay,
            beta=rate,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        return out.transpose(0, 1) if is_rows else out, left

    heads, dims = value.shape[2], (key.shape[3], value.shape[3])
    zero = torch.zeros(1, heads, *dims, dtype=torch.float32, device=value.device)
    return step.run((index, "matrix"), zero, run, dim=1), None
