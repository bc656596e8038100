"""Find out by behaviour whether a model draws random numbers, or counts its calls.

A shared token is visited several times by a tree, and once per sequence by a dense
engine; so what changes from call to call cannot give the same result. Configs name it
in too many ways (dropout, jitter, layer drop), and modules may be changed after they
were built. So a short call is repeated with other seeds, and its modules are compared.

Rare draws, such as a layer that is dropped once in a hundred calls, would pass. Where
numbers are drawn at all, the call is repeated with the smallest and with the largest
number that a draw can give: a comparison with a probability of 0 then stays as it was.

Tests: test_randomness.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from areal_dta.executor.model_refusals import REMEDY, UnsupportedModelError, class_name

Prints = list[tuple[str, Tensor]]
"""One number per module, in the order in which their calls end."""


@contextmanager
def fingerprints(model: nn.Module) -> Iterator[Prints]:
    """Context manager for a call; collects one number per module, in order of ends."""
    found: Prints = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) else output
            if isinstance(first, Tensor) and first.is_floating_point():
                found.append((name, first.detach().double().norm()))

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def check_randomness(model: nn.Module, call: Callable[[], Prints]) -> None:
    """Refuse a model whose result depends on random numbers or on earlier calls.

    Args:
        call: calls the model, always on the same tokens. All ranks make the same calls.

    Raises:
        UnsupportedModelError: names the module.
    """
    device = next(model.parameters()).device
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    others = _other_generators()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        first, other, again = (_seeded(seed, call) for seed in (0, 1, 0))
        after = _torch_state(device)
        torch.manual_seed(0)
        by_extremes = []
        if not torch.equal(_torch_state(device), after):  # numbers were drawn
            for is_high in (False, True):
                with _ExtremeDraws(is_high):
                    by_extremes.append(_seeded(0, call))
    _check_state(model, buffers, others)
    for prints in (other, *by_extremes):
        _compare(model, first, prints, again)


def _seeded(seed: int, call: Callable[[], Prints]) -> Prints:
    torch.manual_seed(seed)
    return call()


def _torch_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _other_generators() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2]


def _check_state(
    model: nn.Module, buffers: dict[str, Tensor], others: tuple[Any, ...]
) -> None:
    """Restore and refuse buffers that the calls changed; refuse other generators."""
    changed = [
        f"{name} is written in every call, and a tree calls the model another number "
        "of times"
        for name, buffer in model.named_buffers()
        if name in buffers and not _is_same(buffer, buffers[name])
    ]
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])
    if _other_generators() != others:
        changed.append("it draws random numbers from Python or NumPy in training")
    if changed:
        raise UnsupportedModelError(
            f"{class_name(model)} cannot be trained on prefix trees: {changed[0]}; "
            f"{REMEDY}"
        )


def _is_same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _compare(model: nn.Module, first: Prints, other: Prints, again: Prints) -> None:
    """Compare two seeds; two calls of one seed tell what kernels do by themselves."""
    eps = torch.finfo(next(model.parameters()).dtype).eps
    for (name, a), (_, b), (_, c) in zip(first, other, again, strict=False):
        by_seed, by_itself = float(abs(a - b)), float(abs(a - c))
        allowed = 0.0 if by_itself == 0 else max(8 * by_itself, 100 * eps * float(a))
        if not by_seed <= min(allowed, 0.01 * float(a)):
            raise UnsupportedModelError(
                f"{class_name(model)} cannot be trained on prefix trees: {name} "
                f"({class_name(model.get_submodule(name))}) draws random numbers "
                "in training, which differ between the visits of a shared token: "
                f"switch that off in the model's config, or {REMEDY}"
            )


class _ExtremeDraws(TorchDispatchMode):
    """Draws from an interval give one of its ends; draws of 0 or 1, one of the two,
    unless its probability is 0. Others, such as normal numbers, are left."""

    def __init__(self, is_high: bool) -> None:
        super().__init__()
        self._is_high = is_high

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("rand", "rand_like"):
            result.fill_(self._end(result, 0.0, 1.0))
        elif name == "uniform_":
            named = kwargs or {}
            low = args[1] if len(args) > 1 else named.get("from", 0.0)
            high = args[2] if len(args) > 2 else named.get("to", 1.0)
            result.fill_(self._end(result, low, high))
        elif name in ("bernoulli_", "bernoulli"):
            chance = (kwargs or {}).get("p", args[1] if len(args) > 1 else None)
            if chance is None:
                chance = args[0] if name == "bernoulli" else 0.5
            chance = torch.as_tensor(chance, device=result.device)
            result.copy_((chance > 0) if self._is_high else (chance >= 1))
        elif name == "native_dropout" and args[1] > 0 and args[2] is not False:
            kept = float(self._is_high)
            result[0].copy_(args[0] * (kept / max(1 - args[1], 1e-6)))
            result[1].fill_(kept)
        return result

    def _end(self, like: Tensor, low: float, high: float) -> float:
        if not self._is_high:
            return low
        return high - torch.finfo(like.dtype).eps * max(abs(high), 1e-6)
