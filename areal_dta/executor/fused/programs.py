"""RMSNorm, SwiGLU and rotary embeddings in Triton, forward and backward; started by
`operators.py`.

Each reads its inputs once and rounds its results once; all between is in fp32 (fp64 for
fp64). There are no atomics: the same batch gives the same bits. What a backward needs
and can compute from its inputs (the mean square, the sigmoid) is not saved.
"""

# R = rows of a tile, D = width, padded to a power of two, N = heads, H = half a head

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(x, DOUBLE: tl.constexpr):
    if DOUBLE:
        return x.to(tl.float64)
    else:
        return x.to(tl.float32)


@triton.jit
def _normed(x, EPS: tl.constexpr, WIDTH: tl.constexpr):
    """Return x / rms [R, D] and 1 / rms [R]; columns beyond WIDTH are 0."""
    scale = 1 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + EPS)
    return x * scale[:, None], scale


@triton.jit
def rms_norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Normalize a tile of rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    at = rows[:, None] * WIDTH + columns[None, :]
    is_there = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    x = widened(tl.load(x_ptr + at, mask=is_there, other=0.0), DOUBLE)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0)
    normed, scale = _normed(x, EPS, WIDTH)
    out = normed * widened(weight, DOUBLE)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def rms_norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    grad_x_ptr,
    partial_ptr,
    num_rows,
    num_tiles,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    DOUBLE: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
):
    """Take ``num_tiles`` tiles of rows; sum the weight's gradient over them."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0)
    weight = widened(weight, DOUBLE)[None, :]
    total = tl.zeros_like(weight)
    for tile in range(num_tiles):
        rows = (program * num_tiles + tile) * ROWS + tl.arange(0, ROWS)
        at = rows[:, None] * WIDTH + columns[None, :]
        is_there = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
        x = widened(tl.load(x_ptr + at, mask=is_there, other=0.0), DOUBLE)
        grad = widened(tl.load(grad_ptr + at, mask=is_there, other=0.0), DOUBLE)
        normed, scale = _normed(x, EPS, WIDTH)
        inner = grad * weight
        mean = tl.sum(inner * normed, 1) / WIDTH
        grad_x = (inner - normed * mean[:, None]) * scale[:, None]
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=is_there)
        if NEEDS_WEIGHT:
            total += tl.sum(grad * normed, 0)[None, :]
    if NEEDS_WEIGHT:
        to = partial_ptr + program * WIDTH + columns[None, :]
        tl.store(to, total, mask=(columns < WIDTH)[None, :])


@triton.jit
def swiglu(
    gate_ptr, up_ptr, out_ptr, num_elements, SIZE: tl.constexpr, DOUBLE: tl.constexpr
):
    """Compute silu(gate) * up."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    is_there = at < num_elements
    gate = widened(tl.load(gate_ptr + at, mask=is_there, other=0.0), DOUBLE)
    up = widened(tl.load(up_ptr + at, mask=is_there, other=0.0), DOUBLE)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def swiglu_backward(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    num_elements,
    SIZE: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Compute both gradients; silu(gate) again."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    is_there = at < num_elements
    grad = widened(tl.load(grad_ptr + at, mask=is_there, other=0.0), DOUBLE)
    gate = widened(tl.load(gate_ptr + at, mask=is_there, other=0.0), DOUBLE)
    up = widened(tl.load(up_ptr + at, mask=is_there, other=0.0), DOUBLE)
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    to = grad_gate_ptr.dtype.element_ty
    tl.store(grad_gate_ptr + at, grad_gate.to(to), mask=is_there)
    tl.store(grad_up_ptr + at, (grad * silu).to(to), mask=is_there)


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    x_strides,
    out_strides,
    token,
    cos_low,
    cos_high,
    sin_low,
    sin_high,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    DOUBLE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    heads, columns = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED)
    is_there = (heads < NUM_HEADS)[:, None] & (columns < HALF)[None, :]
    at = token * x_strides[0] + heads[:, None] * x_strides[1] + columns[None, :]
    low = widened(tl.load(x_ptr + at, mask=is_there, other=0.0), DOUBLE)
    high = widened(tl.load(x_ptr + at + HALF, mask=is_there, other=0.0), DOUBLE)
    if BACKWARD:
        first = low * cos_low + high * sin_high
        second = high * cos_high - low * sin_low
    else:
        first = low * cos_low - high * sin_low
        second = high * cos_high + low * sin_high
    to = token * out_strides[0] + heads[:, None] * out_strides[1] + columns[None, :]
    tl.store(out_ptr + to, first.to(out_ptr.dtype.element_ty), mask=is_there)
    tl.store(out_ptr + to + HALF, second.to(out_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def rotate(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    out_q_ptr,
    out_k_ptr,
    q_strides,
    k_strides,
    out_q_strides,
    out_k_strides,
    table_stride,
    NUM_Q: tl.constexpr,
    NUM_K: tl.constexpr,
    PADDED_Q: tl.constexpr,
    PADDED_K: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    DOUBLE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Rotate all heads of one token, or turn gradients of the rotated back.

    Element i of a head turns with element i + HALF. Strides are those of tokens and
    heads.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    at, is_there = token * table_stride + columns, columns < HALF
    cos_low = tl.load(cos_ptr + at, mask=is_there, other=0.0)
    cos_high = tl.load(cos_ptr + at + HALF, mask=is_there, other=0.0)
    sin_low = tl.load(sin_ptr + at, mask=is_there, other=0.0)
    sin_high = tl.load(sin_ptr + at + HALF, mask=is_there, other=0.0)
    cos_low = widened(cos_low, DOUBLE)[None, :]
    cos_high = widened(cos_high, DOUBLE)[None, :]
    sin_low = widened(sin_low, DOUBLE)[None, :]
    sin_high = widened(sin_high, DOUBLE)[None, :]
    _rotate_heads(
        q_ptr,
        out_q_ptr,
        q_strides,
        out_q_strides,
        token,
        cos_low,
        cos_high,
        sin_low,
        sin_high,
        NUM_Q,
        PADDED_Q,
        HALF,
        PADDED,
        DOUBLE,
        BACKWARD,
    )
    _rotate_heads(
        k_ptr,
        out_k_ptr,
        k_strides,
        out_k_strides,
        token,
        cos_low,
        cos_high,
        sin_low,
        sin_high,
        NUM_K,
        PADDED_K,
        HALF,
        PADDED,
        DOUBLE,
        BACKWARD,
    )
