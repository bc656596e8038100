"""Which layers of a model have a fused kernel, and their place in the model.

A layer is recognised by what it computes, not by its name alone: each kind is run on
random numbers beside the kernel, forward and backward, on the model's device, and is
replaced where both agree to rounding in fp32. So Gemma's norm, which scales by 1 + w,
stays as it is. Sharded models can be probed: a probe has numbers in place of parameters
and projections.

A module's forward is replaced, not its call, so that hooks (which gather parameters)
run as before.

Invariants, and the tests that hold them (tests/executor/test_fused_layers.py):
  * gradients of whole models equal one-sequence-at-a-time training
  * what computes something else is left as it is, and named
"""

# S = tokens, D = width, N = query heads, K = key heads, H = head dim

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from areal_dta.executor.checks.multimodal import text_modules
from areal_dta.executor.fused.operators import MAX_WIDTH, rms_norm, rotate, swiglu
from areal_dta.executor.kernels.triton_ops import is_installed, is_interpreted

FUSED_LAYERS = ("auto", "on", "off")
"""Values of `ExecutorConfig.fused_layers`."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIN_CAPABILITY = (8, 0)
_TOLERANCE = 1e-5
"""Largest difference between a layer and its kernel, both in fp32, relative in norm."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ROTATE = "apply_rotary_pos_emb"
_PROBE_WIDTH, _PROBE_ROWS = 64, 5


class FusedLayers:
    """The layers of a model that run as fused kernels, once `active` or `install`.

    Args:
        choice: ``auto`` takes what is right, on a GPU of compute capability 8.0 and
            later with Triton; ``on`` requires it; ``off`` takes nothing.

    Raises:
        ValueError: ``on``, and the device cannot run the kernels, or some layer
            computes something else; names it.
    """

    def __init__(self, model: nn.Module, choice: str) -> None:
        if choice not in FUSED_LAYERS:
            raise ValueError(
                f"fused_layers={choice!r}; expected {' or '.join(FUSED_LAYERS)}"
            )
        self._choice = choice
        self.replaced: dict[str, int] = {}
        """Class or function -> how many of it run as a kernel."""
        self.left: dict[str, str] = {}
        """Class or function with the name of one that has a kernel -> why not it."""
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._functions: list[tuple[Any, Callable[..., Any]]] = []
        if choice == "off":
            return
        device = next(model.parameters()).device
        problem = _device_problem(device, choice)
        if problem is None:
            self._find(model, device)
        elif choice == "on":
            raise ValueError(f"fused_layers=on: {problem}; use auto or off")
        if choice == "on" and (self.left or not self.replaced):
            listed = "; ".join(f"{name}: {why}" for name, why in self.left.items())
            raise ValueError(
                f"fused_layers=on: {listed or 'the model has no such layers'}; use "
                "auto, which runs what it can"
            )

    def __str__(self) -> str:
        parts = [f"{num} {name}" for name, num in self.replaced.items()]
        text = f"{self._choice}: kernels run {', '.join(parts) or 'no layers'}"
        left = [f"{name} ({why})" for name, why in self.left.items()]
        return text + (f"; as they are: {', '.join(left)}" if left else "")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager in which the layers are replaced."""
        with ExitStack() as stack:
            for module, forward in self._forwards:
                stack.enter_context(_replaced(module, "forward", forward))
            for owner, function in self._functions:
                stack.enter_context(_replaced(owner, _ROTATE, function))
            yield

    def install(self) -> None:
        """Replace the layers for good."""
        for module, forward in self._forwards:
            module.forward = forward
        for owner, function in self._functions:
            setattr(owner, _ROTATE, function)

    def _find(self, model: nn.Module, device: torch.device) -> None:
        """Probe one layer of each kind, and take all that are like it."""
        known: dict[Any, str | None] = {}
        rotaries: dict[str, Any] = {}
        for module in text_modules(model).values():
            name = type(module).__name__.removeprefix("FSDP")
            owner = sys.modules.get(type(module).__module__)
            if hasattr(module, "layer_idx") and hasattr(owner, _ROTATE):
                rotaries[type(module).__module__] = owner
            make = _kind_of(module)
            if make is None:
                continue
            key = (type(module), make, _settings(module))
            if key not in known:
                known[key] = _difference(partial(_PROBES[make], module, device))
            self._note(name, known[key])
            if known[key] is None:
                self._forwards.append((module, make(module)))
        for owner in rotaries.values():
            function = getattr(owner, _ROTATE)
            if hasattr(function, "_of_areal_dta"):  # installed for another model
                self._note(_ROTATE, None)
                continue
            why = _difference(partial(_probe_rotation, function, device))
            self._note(_ROTATE, why)
            if why is None:
                self._functions.append((owner, _rotation(function)))

    def _note(self, name: str, why: str | None) -> None:
        if why is None:
            self.replaced[name] = self.replaced.get(name, 0) + 1
        else:
            self.left[name] = why


def _device_problem(device: torch.device, choice: str) -> str | None:
    if not is_installed():
        return "Triton is not installed"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            return f"the GPU has compute capability {capability}; expected (8, 0)"
        return None
    if device.type == "cpu" and is_interpreted() and choice == "on":
        return None  # for tests
    return f"the model is on {device.type}; expected a GPU"


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    is_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _serves(*tensors: Any) -> bool:
    """Return whether a kernel takes these: one dtype, no tensors of several ranks."""
    first = tensors[0]
    dtypes = (*_DTYPES, torch.float64) if not first.is_cuda else _DTYPES
    return first.dtype in dtypes and all(
        x.dtype == first.dtype and not hasattr(x, "to_local") for x in tensors
    )


def _norm_forward(module: Any) -> Callable[..., Tensor]:
    plain = module.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight: Tensor = module.weight
        is_plain = not (args or kwargs)
        if is_plain and _serves(hidden_states, weight):
            return rms_norm(hidden_states, weight, _eps(module))
        out: Tensor = plain(hidden_states, *args, **kwargs)
        return out

    return forward


def _mlp_forward(module: Any) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        gate, up = module.gate_proj(hidden_states), module.up_proj(hidden_states)
        inner = swiglu(gate, up) if _serves(gate, up) else module.act_fn(gate) * up
        out: Tensor = module.down_proj(inner)
        return out

    return forward


def _rotation(plain: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        is_plain = not (args or kwargs) and q.dim() == 4 and len(q) == 1
        is_whole = is_plain and cos.shape == (1, q.shape[2], q.shape[3])
        if is_whole and _on_device(q) and _serves(q, k, cos, sin):
            return rotate(q, k, cos, sin)
        return plain(q, k, cos, sin, *args, **kwargs)

    apply_rotary_pos_emb._of_areal_dta = True  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _on_device(x: Tensor) -> bool:
    """Return whether kernels run there: the function belongs to all models of its
    module, whatever device they are on."""
    return x.is_cuda or is_interpreted()


def _kind_of(module: nn.Module) -> Callable[[Any], Callable[..., Tensor]] | None:
    """Return what makes the kernel's forward of a module that may have one."""
    if "forward" in vars(module):  # someone has replaced it
        return None
    if "RMSNorm" in type(module).__name__:
        return _norm_forward
    if all(hasattr(module, name) for name in (*_PROJECTIONS, "act_fn")):
        return _mlp_forward
    return None


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return whatever two modules of a class may differ by, shapes included."""
    plain = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str) and name != "training"
    }
    shapes = [tuple(x.shape[-1:]) for x in module._parameters.values() if x is not None]
    act = type(getattr(module, "act_fn", None)).__name__
    return (*sorted(plain.items()), *shapes, act)


def _eps(module: Any) -> float:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if value is not None:
            return float(value)
    return float(torch.finfo(module.weight.dtype).eps)


def _difference(probe: Callable[[], list[tuple[Tensor, Tensor]]]) -> str | None:
    """Return why a layer is left as it is; None: its kernel computes the same."""
    try:
        pairs = probe()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the layer wants something else, or Triton fails
        return f"not comparable: {type(error).__name__}: {error}".splitlines()[0]
    worst = max(map(_relative, pairs))
    if worst <= _TOLERANCE:
        return None
    return f"another formula: a relative difference of {worst:.1g}"


def _relative(pair: tuple[Tensor, Tensor]) -> float:
    got, expected = pair
    if got.shape != expected.shape:
        return float("inf")
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    return float(error)


def _stand_in(module: nn.Module, parts: dict[str, Any]) -> Any:
    """Return a module of the same class and settings, with other parts.

    Parameters may be shards, which cannot be used outside of the model's own call.
    """
    found: Any = module.__class__.__new__(module.__class__)
    own = dict(vars(module))
    for kind in ("_parameters", "_modules", "_buffers"):
        own[kind] = {k: v for k, v in own[kind].items() if k not in parts}
    found.__dict__.update(own | parts)
    return found


def _random(device: torch.device, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw).to(device).requires_grad_()


def _with_gradients(outs: Any, inputs: list[Tensor]) -> list[Tensor]:
    outs = outs if isinstance(outs, tuple) else (outs,)
    grads = [torch.linspace(-1, 2, x.numel(), device=x.device).view_as(x) for x in outs]
    found = torch.autograd.grad(outs, inputs, grads)
    return [x.detach() for x in (*outs, *found)]


def _probe_norm(module: Any, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    (width,) = module.weight.shape
    if width > MAX_WIDTH:
        raise ValueError(f"{width} wide; the kernel takes up to {MAX_WIDTH}")
    x, weight = _random(device, 1, _PROBE_ROWS, width), _random(device, width)
    # Rows so small that what is added to the mean square shows.
    size = torch.tensor([1.0, 1e-3, 30.0, 1e-2, 1.0], device=device)[:, None]
    norm = _stand_in(module, {"weight": weight})
    with torch.enable_grad():
        found = [
            _with_gradients(run(x * size), [x, weight])
            for run in (lambda y: rms_norm(y, weight, _eps(norm)), norm.forward)
        ]
    return list(zip(*found, strict=True))


def _probe_mlp(module: Any, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    width = _PROBE_WIDTH
    x = _random(device, 1, _PROBE_ROWS, 2 * width)
    parts = {
        "gate_proj": lambda y: y[..., :width] * 3,
        "up_proj": lambda y: y[..., width:],
        "down_proj": lambda y: y,
    }
    mlp = _stand_in(module, parts)
    own = _mlp_forward(mlp)
    with torch.enable_grad():
        found = [_with_gradients(run(x), [x]) for run in (own, mlp.forward)]
    return list(zip(*found, strict=True))


def _probe_rotation(
    function: Callable[..., Any], device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    size = _PROBE_WIDTH
    q, k = (
        _random(device, 1, _PROBE_ROWS, heads, size).transpose(1, 2) for heads in (4, 2)
    )
    angles = _random(device, 1, _PROBE_ROWS, size // 2).detach()
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos(), angles.sin()
    with torch.enable_grad():
        found = [
            _with_gradients(run(q, k, cos, sin), [q, k]) for run in (rotate, function)
        ]
    return list(zip(*found, strict=True))


_PROBES: dict[Any, Callable[[Any, torch.device], list[tuple[Tensor, Tensor]]]] = {
    _norm_forward: _probe_norm,
    _mlp_forward: _probe_mlp,
}
