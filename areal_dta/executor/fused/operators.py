"""RMSNorm, SwiGLU and rotary embeddings as one kernel each, differentiable.

The operators (`torch.ops.areal_dta`) give shapes alone on meta and fake tensors, where
no Triton is needed. Around them are autograd functions, which save their inputs and
nothing else.

Invariants, and the tests that hold them (tests/executor/test_fused_layers.py):
  * outputs and gradients are those of plain PyTorch in fp64 to 1e-12; of bf16 inputs
    they are rounded once
"""

# S = tokens, D = width, N = query heads, K = key heads, H = head dim

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from areal_dta.executor.kernels.base import accumulation_dtype
from areal_dta.executor.kernels.triton_ops import dense_heads, on_device, token_strides

MAX_WIDTH = 2**14
"""Widest row of a norm: it is in the registers of one program."""
_TILE_ELEMENTS = 4096
_SWIGLU_ELEMENTS = 1024
_MAX_PROGRAMS = 264
"""Programs of a norm's backward, each of which sums the weight's gradient over its
rows: two per multiprocessor of an H100. A constant, so that bits do not depend on the
card."""

LAUNCHES = {
    "areal_dta::rms_norm": 1,
    "areal_dta::rms_norm_backward": 2,
    "areal_dta::swiglu": 1,
    "areal_dta::swiglu_backward": 1,
    "areal_dta::rotate": 1,
}
"""Kernels that a call of each operator starts."""

_library = torch.library.Library("areal_dta", "FRAGMENT")
_library.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
_library.define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps, "
    "bool needs_weight) -> (Tensor, Tensor)"
)
_library.define("swiglu(Tensor gate, Tensor up) -> Tensor")
_library.define(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)"
)
_library.define(
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool backward) "
    "-> (Tensor, Tensor)"
)


@cache
def _programs() -> Any:
    """Return the module of programs; imports Triton."""
    from areal_dta.executor.fused import programs

    return programs


def _norm_sizes(x: Tensor) -> dict[str, Any]:
    width = x.shape[-1]
    padded = _power_of_two(width)
    rows = max(1, _TILE_ELEMENTS // padded)
    return {"WIDTH": width, "PADDED": padded, "ROWS": rows, "DOUBLE": _is_double(x)}


def _norm_warps(sizes: dict[str, Any]) -> int:
    return 4 if sizes["PADDED"] <= _TILE_ELEMENTS else 16


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out, sizes = torch.empty_like(x), _norm_sizes(x)
    num_rows = x.numel() // x.shape[-1]
    with on_device(x):
        _programs().rms_norm[(max(1, -(-num_rows // sizes["ROWS"])),)](
            x, weight, out, num_rows, EPS=eps, **sizes, num_warps=_norm_warps(sizes)
        )
    return out


def _rms_norm_meta(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    grad_x, sizes = torch.empty_like(x), _norm_sizes(x)
    num_rows = x.numel() // x.shape[-1]
    num_tiles = max(1, -(-num_rows // sizes["ROWS"]))
    per_program = -(-num_tiles // _MAX_PROGRAMS)
    num_programs = -(-num_tiles // per_program)
    acc = accumulation_dtype(x.dtype)
    shape = (num_programs if needs_weight else 1, x.shape[-1])
    partial = torch.empty(shape, dtype=acc, device=x.device)
    with on_device(x):
        _programs().rms_norm_backward[(num_programs,)](
            grad,
            x,
            weight,
            grad_x,
            partial,
            num_rows,
            per_program,
            EPS=eps,
            **sizes,
            NEEDS_WEIGHT=needs_weight,
            num_warps=_norm_warps(sizes),
        )
    if not needs_weight:
        return grad_x, weight.new_empty(0)
    return grad_x, partial.sum(0).to(weight.dtype)


def _rms_norm_backward_meta(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(
        weight.shape if needs_weight else (0,)
    )


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    with on_device(gate):
        _programs().swiglu[_swiglu_grid(gate)](
            gate,
            up,
            out,
            gate.numel(),
            SIZE=_SWIGLU_ELEMENTS,
            DOUBLE=_is_double(gate),
        )
    return out


def _swiglu_meta(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(gate)
    with on_device(gate):
        _programs().swiglu_backward[_swiglu_grid(gate)](
            grad,
            gate,
            up,
            grad_gate,
            grad_up,
            gate.numel(),
            SIZE=_SWIGLU_ELEMENTS,
            DOUBLE=_is_double(gate),
        )
    return grad_gate, grad_up


def _swiglu_backward_meta(
    grad: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _swiglu_grid(gate: Tensor) -> tuple[int]:
    return (max(1, -(-gate.numel() // _SWIGLU_ELEMENTS)),)


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool
) -> tuple[Tensor, Tensor]:
    q, k = dense_heads(q), dense_heads(k)
    cos, sin = cos.contiguous(), sin.contiguous()
    out_q, out_k = _rotate_meta(q, k, cos, sin, backward)
    half = q.shape[-1] // 2
    with on_device(q):
        _programs().rotate[(q.shape[2],)](
            q,
            k,
            cos,
            sin,
            out_q,
            out_k,
            *map(token_strides, (q, k, out_q, out_k)),
            cos.shape[-1],
            NUM_Q=q.shape[1],
            NUM_K=k.shape[1],
            PADDED_Q=_power_of_two(q.shape[1]),
            PADDED_K=_power_of_two(k.shape[1]),
            HALF=half,
            PADDED=_power_of_two(half),
            DOUBLE=_is_double(q),
            BACKWARD=backward,
        )
    return out_q, out_k


def _rotate_meta(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool
) -> tuple[Tensor, Tensor]:
    # In the layout of the projections, which attention reads: no copies afterwards.
    outs = [
        x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
        for x in (q, k)
    ]
    return outs[0], outs[1]


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _is_double(x: Tensor) -> bool:
    return x.dtype == torch.float64


for _name, _run, _shapes in (
    ("rms_norm", _rms_norm, _rms_norm_meta),
    ("rms_norm_backward", _rms_norm_backward, _rms_norm_backward_meta),
    ("swiglu", _swiglu, _swiglu_meta),
    ("swiglu_backward", _swiglu_backward, _swiglu_backward_meta),
    ("rotate", _rotate, _rotate_meta),
):
    _library.impl(_name, _run, "CPU")
    _library.impl(_name, _run, "CUDA")
    _library.impl(_name, _shapes, "Meta")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out: Tensor = torch.ops.areal_dta.rms_norm(x, weight, eps)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        grad_x, grad_weight = torch.ops.areal_dta.rms_norm_backward(
            grads[0], x, weight, ctx.eps, needs_weight
        )
        return grad_x, grad_weight if needs_weight else None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out: Tensor = torch.ops.areal_dta.swiglu(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.ops.areal_dta.swiglu_backward(grads[0], *ctx.saved_tensors)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.shapes = q.shape, k.shape
        ctx.set_materialize_grads(False)
        out_q, out_k = torch.ops.areal_dta.rotate(q, k, cos, sin, False)
        return out_q, out_k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # One of the two may be unused, as a block's queries are that is there for keys.
        used = next(grad for grad in grads if grad is not None)
        both = [
            used.new_zeros(shape) if grad is None else grad
            for grad, shape in zip(grads, ctx.shapes, strict=True)
        ]
        out_q, out_k = torch.ops.areal_dta.rotate(*both, *ctx.saved_tensors, True)
        return out_q, out_k, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        x: [..., D].
        weight: [D], of the same dtype.
    """
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, of one shape and dtype."""
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys with rotary embeddings: x cos + rotate_half(x) sin.

    Args:
        q, k: [1, N, S, H] and [1, K, S, H], H even.
        cos, sin: [1, S, H], constants.
    """
    out_q, out_k = _Rotate.apply(q, k, cos, sin)
    return out_q, out_k
