"""Tree attention in Triton, backward; see `triton_forward.py` for rows and tiles.

Two passes, each of which owns what it writes, so nothing is added by atomics: one over
rows for dq, which leaves delta = sum(dout * out) behind; one over keys for dk and dv.
The queries that see any key of a tile are one range: from its first key to the highest
end of a subtree. Gradients of the path are added to its accumulators.
"""

# M = rows of a tile, N = keys of a tile, H = head dim, padded to a power of two

from __future__ import annotations

import triton
import triton.language as tl

from areal_dta.executor.kernels.triton_forward import (
    LOG2_E,
    dot,
    load_keys,
    load_rows,
    scores_of,
    sees_block,
    sees_path,
)


@triton.jit
def _score_gradient(
    q,
    k,
    v,
    grad_out,
    visible,
    lse,
    delta,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the weights [M, N], and the gradient of q.k divided by the scale."""
    scores, capped = scores_of(q, k, SCALE, SOFTCAP, UPCAST)
    weights = tl.exp2(scores - lse[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    grad = weights * (dot(grad_out, tl.trans(v), UPCAST) - delta[:, None])
    if SOFTCAP > 0:
        grad = grad * (1 - capped * capped)
    return weights, grad


@triton.jit
def backward_rows(
    grad_out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    path_k_ptr,
    path_v_ptr,
    out_ptr,
    lse_ptr,
    last_ptr,
    depth_ptr,
    list_ptr,
    count_ptr,
    grad_q_ptr,
    delta_ptr,
    grad_out_strides,
    q_strides,
    k_strides,
    v_strides,
    path_k_strides,
    path_v_strides,
    out_strides,
    grad_q_strides,
    num_queries,
    num_path,
    path_start,
    list_stride,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute dq of one tile of rows, and delta for `backward_keys`."""
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    at, of_head = rows // GROUP, head * GROUP + rows % GROUP
    columns, column_N = tl.arange(0, PADDED), tl.arange(0, BLOCK_N)
    is_query = at < num_queries
    is_row = is_query[:, None] & (columns < WIDTH)[None, :]
    q = load_rows(q_ptr, at, q_strides, of_head, is_row, columns)
    grad_out = load_rows(grad_out_ptr, at, grad_out_strides, of_head, is_row, columns)
    out = load_rows(out_ptr, at, out_strides, of_head, is_row, columns)
    at_lse = of_head * num_queries + at
    lse = tl.load(lse_ptr + at_lse, mask=is_query, other=float("inf")) * LOG2_E
    delta = tl.sum(grad_out.to(ACC) * out.to(ACC), 1)
    tl.store(delta_ptr + at_lse, delta, mask=is_query)
    depth_M = at
    if WINDOW > 0:
        depth_M = tl.load(depth_ptr + at, mask=is_query, other=0)
    grad_q = tl.zeros([BLOCK_M, PADDED], dtype=ACC)

    # The path: whole tiles, without a mask unless there is a window; then the rest.
    k_ptr += head * k_strides[1]
    v_ptr += head * v_strides[1]
    path_k_ptr += head * path_k_strides[1]
    path_v_ptr += head * path_v_strides[1]
    num_whole = num_path // BLOCK_N * BLOCK_N
    for start in range(0, num_whole, BLOCK_N):
        keys = start + column_N
        k = load_keys(path_k_ptr, keys, path_k_strides[0], columns, 0, WIDTH, True)
        v = load_keys(path_v_ptr, keys, path_v_strides[0], columns, 0, WIDTH, True)
        visible = keys
        if WINDOW > 0:
            visible = sees_path(at, depth_M, keys, num_path, path_start, WINDOW)
        _, grad = _score_gradient(
            q, k, v, grad_out, visible, lse, delta, SCALE, SOFTCAP, UPCAST, WINDOW > 0
        )
        grad_q += dot(grad.to(k.dtype), k, UPCAST)
    if num_whole < num_path:
        keys = num_whole + column_N
        k = load_keys(
            path_k_ptr, keys, path_k_strides[0], columns, num_path, WIDTH, False
        )
        v = load_keys(
            path_v_ptr, keys, path_v_strides[0], columns, num_path, WIDTH, False
        )
        visible = sees_path(at, depth_M, keys, num_path, path_start, WINDOW)
        _, grad = _score_gradient(
            q, k, v, grad_out, visible, lse, delta, SCALE, SOFTCAP, UPCAST, True
        )
        grad_q += dot(grad.to(k.dtype), k, UPCAST)

    # The block: the tiles that some row sees.
    for n in range(0, tl.load(count_ptr + tile)):
        keys = tl.load(list_ptr + tile * list_stride + n) * BLOCK_N + column_N
        k = load_keys(k_ptr, keys, k_strides[0], columns, num_queries, WIDTH, False)
        v = load_keys(v_ptr, keys, v_strides[0], columns, num_queries, WIDTH, False)
        visible = sees_block(
            at, depth_M, keys, last_ptr, depth_ptr, num_queries, WINDOW
        )
        _, grad = _score_gradient(
            q, k, v, grad_out, visible, lse, delta, SCALE, SOFTCAP, UPCAST, True
        )
        grad_q += dot(grad.to(k.dtype), k, UPCAST)

    grad_q = (grad_q * SCALE).to(grad_q_ptr.dtype.element_ty)
    at_q = of_head[:, None] * grad_q_strides[1]
    at_q += at.to(tl.int64)[:, None] * grad_q_strides[0]
    tl.store(grad_q_ptr + at_q + columns[None, :], grad_q, mask=is_row)


@triton.jit
def _gradients_of_keys(
    k,
    v,
    keys,
    first_row,
    end_row,
    head,
    grad_out_ptr,
    q_ptr,
    lse_ptr,
    last_ptr,
    depth_ptr,
    delta_ptr,
    grad_out_strides,
    q_strides,
    num_queries,
    num_path,
    path_start,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UPCAST: tl.constexpr,
    IS_PATH: tl.constexpr,
):
    """Return dk and dv [N, H] of one tile of keys, from the rows of a range."""
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    columns = tl.arange(0, k.shape[1])
    grad_k = tl.zeros(k.shape, dtype=ACC)
    grad_v = tl.zeros(k.shape, dtype=ACC)
    for start in range(first_row, end_row, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        at, of_head = rows // GROUP, head * GROUP + rows % GROUP
        is_query = at < num_queries
        is_row = is_query[:, None] & (columns < WIDTH)[None, :]
        q = load_rows(q_ptr, at, q_strides, of_head, is_row, columns)
        grad_out = load_rows(
            grad_out_ptr, at, grad_out_strides, of_head, is_row, columns
        )
        at_lse = of_head * num_queries + at
        # Rows beyond the last query get weights of exp2(-inf) = 0.
        lse = tl.load(lse_ptr + at_lse, mask=is_query, other=float("inf")) * LOG2_E
        delta = tl.load(delta_ptr + at_lse, mask=is_query, other=0.0)
        depth_M = at
        if WINDOW > 0:
            depth_M = tl.load(depth_ptr + at, mask=is_query, other=0)
        visible = keys
        if not IS_PATH:
            visible = sees_block(
                at, depth_M, keys, last_ptr, depth_ptr, num_queries, WINDOW
            )
        elif WINDOW > 0:
            visible = sees_path(at, depth_M, keys, num_path, path_start, WINDOW)
        weights, grad = _score_gradient(
            q,
            k,
            v,
            grad_out,
            visible,
            lse,
            delta,
            SCALE,
            SOFTCAP,
            UPCAST,
            WINDOW > 0 or not IS_PATH,
        )
        grad_v += dot(tl.trans(weights).to(v.dtype), grad_out, UPCAST)
        grad_k += dot(tl.trans(grad).to(k.dtype), q, UPCAST)
    return grad_k * SCALE, grad_v


@triton.jit
def backward_keys(
    grad_out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    path_k_ptr,
    path_v_ptr,
    lse_ptr,
    last_ptr,
    depth_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
    path_grad_k_ptr,
    path_grad_v_ptr,
    grad_out_strides,
    q_strides,
    k_strides,
    v_strides,
    path_k_strides,
    path_v_strides,
    grad_k_strides,
    path_grad_strides,
    num_queries,
    num_path,
    path_start,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute dk, dv of one tile of keys; those of the path are added in fp32 (fp64).

    Tiles of the path come first: all rows see them.
    """
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, PADDED)
    num_path_tiles = tl.cdiv(num_path, BLOCK_N)
    if tile < num_path_tiles:
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_there = (keys < num_path)[:, None] & (columns < WIDTH)[None, :]
        k_at = path_k_ptr + head * path_k_strides[1]
        v_at = path_v_ptr + head * path_v_strides[1]
        k = load_keys(k_at, keys, path_k_strides[0], columns, num_path, WIDTH, False)
        v = load_keys(v_at, keys, path_v_strides[0], columns, num_path, WIDTH, False)
        grad_k, grad_v = _gradients_of_keys(
            k,
            v,
            keys,
            0,
            num_queries * GROUP,
            head,
            grad_out_ptr,
            q_ptr,
            lse_ptr,
            last_ptr,
            depth_ptr,
            delta_ptr,
            grad_out_strides,
            q_strides,
            num_queries,
            num_path,
            path_start,
            GROUP,
            SCALE,
            SOFTCAP,
            WINDOW,
            WIDTH,
            BLOCK_M,
            UPCAST,
            True,
        )
        where = head * path_grad_strides[1] + keys[:, None] * path_grad_strides[0]
        where += columns[None, :]
        total_k = tl.load(path_grad_k_ptr + where, mask=is_there, other=0.0)
        tl.store(path_grad_k_ptr + where, total_k + grad_k, mask=is_there)
        total_v = tl.load(path_grad_v_ptr + where, mask=is_there, other=0.0)
        tl.store(path_grad_v_ptr + where, total_v + grad_v, mask=is_there)
    else:
        first = (tile - num_path_tiles) * BLOCK_N
        keys = first + tl.arange(0, BLOCK_N)
        is_there = (keys < num_queries)[:, None] & (columns < WIDTH)[None, :]
        k_at, v_at = k_ptr + head * k_strides[1], v_ptr + head * v_strides[1]
        k = load_keys(k_at, keys, k_strides[0], columns, num_queries, WIDTH, False)
        v = load_keys(v_at, keys, v_strides[0], columns, num_queries, WIDTH, False)
        last = tl.load(last_ptr + keys, mask=keys < num_queries, other=0)
        grad_k, grad_v = _gradients_of_keys(
            k,
            v,
            keys,
            first * GROUP,
            tl.max(last, 0).to(tl.int32) * GROUP,
            head,
            grad_out_ptr,
            q_ptr,
            lse_ptr,
            last_ptr,
            depth_ptr,
            delta_ptr,
            grad_out_strides,
            q_strides,
            num_queries,
            num_path,
            path_start,
            GROUP,
            SCALE,
            SOFTCAP,
            WINDOW,
            WIDTH,
            BLOCK_M,
            UPCAST,
            False,
        )
        where = head * grad_k_strides[1] + keys[:, None] * grad_k_strides[0]
        where += columns[None, :]
        own_k = grad_k.to(grad_k_ptr.dtype.element_ty)
        tl.store(grad_k_ptr + where, own_k, mask=is_there)
        own_v = grad_v.to(grad_v_ptr.dtype.element_ty)
        tl.store(grad_v_ptr + where, own_v, mask=is_there)
