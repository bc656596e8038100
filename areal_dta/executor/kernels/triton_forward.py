"""Tree attention in Triton, forward; started by `triton_tree.py`.

The rows of a tile are the heads of a few neighbouring queries that share keys: row r is
head r % GROUP of query r // GROUP. So a key is read once for all of them, and its
gradient is a sum over rows: no atomics, and the same batch gives the same bits.

A query sees the whole path (under a window, by depth), and of its block the keys that
come before it and whose subtree has not ended: j <= i < last[j]. Key tiles of the block
that no query of a tile sees are in no list (`list_tiles`), and are not read.

Scores are kept in units of log2, since the hardware has exp2.
"""

# M = rows of a tile, N = keys of a tile, H = head dim, padded to a power of two

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def list_tiles(
    last_ptr,
    depth_ptr,
    list_ptr,
    count_ptr,
    num_queries,
    list_stride,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List for each tile of rows the key tiles of the block that some row sees."""
    tile = tl.program_id(0)
    first = tile * BLOCK_M // GROUP
    end = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, num_queries)
    if WINDOW > 0:
        at = first + tl.arange(0, BLOCK_M)
        lowest = tl.min(tl.load(depth_ptr + at, mask=at < end, other=2**31 - 1), 0)
    count = 0
    for chunk in range(0, tl.cdiv(end, BLOCK_N), CHUNK):
        blocks = chunk + tl.arange(0, CHUNK)
        keys = blocks[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        last = tl.load(last_ptr + keys, mask=keys < end, other=0)
        is_seen = tl.max(last, 1) > first
        if WINDOW > 0:
            depth = tl.load(depth_ptr + keys, mask=keys < end, other=0)
            is_seen = is_seen & (lowest - tl.max(depth, 1) < WINDOW)
        number = is_seen.to(tl.int32)
        at_list = tile * list_stride + count + tl.cumsum(number, 0) - 1
        tl.store(list_ptr + at_list, blocks, mask=is_seen)
        count += tl.sum(number, 0)
    tl.store(count_ptr + tile, count)


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Multiply with accumulation in fp32 (fp64); never by way of TF32.

    The interpreter cannot multiply bf16: it gets the same values in fp32.
    """
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _tanh(x):
    """Compute tanh; by its series where 1 - exp(-2x) would cancel."""
    square = x * x
    tail = 17 / 315 - square * (62 / 2835 - square * (1382 / 155925))
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * tail)))
    t = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    far = (1 - t) / (1 + t)
    far = tl.where(x < 0, -far, far)
    return tl.where(square < 1 / 64, series, far)


@triton.jit
def scores_of(q, k, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr):
    """Return scores [M, N] in units of log2, and of capped ones their tanh."""
    scores = dot(q, tl.trans(k), UPCAST)
    if SOFTCAP > 0:
        capped = _tanh(scores * (SCALE / SOFTCAP))
        return capped * (SOFTCAP * LOG2_E), capped
    else:
        return scores * (SCALE * LOG2_E), scores


@triton.jit
def load_rows(ptr, at, strides, head, is_row, columns):
    """Load [M, H]: the queries and heads of a tile of rows; zeros beyond."""
    where = head[:, None] * strides[1] + at.to(tl.int64)[:, None] * strides[0]
    return tl.load(ptr + where + columns[None, :], mask=is_row, other=0.0)


@triton.jit
def load_keys(
    ptr, keys, stride, columns, num_keys, WIDTH: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """Load [N, H] of the keys of one head; zeros beyond ``num_keys`` and WIDTH."""
    where = ptr + keys[:, None] * stride + columns[None, :]
    if not IS_WHOLE:
        is_there = (keys < num_keys)[:, None] & (columns < WIDTH)[None, :]
        return tl.load(where, mask=is_there, other=0.0)
    elif columns.shape[0] > WIDTH:
        return tl.load(where, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def sees_path(at, depth_M, keys, num_path, path_start, WINDOW: tl.constexpr):
    """Return [M, N]: which keys of the path the rows see."""
    visible = (keys < num_path)[None, :] & (at >= 0)[:, None]
    if WINDOW > 0:
        visible = visible & (depth_M[:, None] - (path_start + keys)[None, :] < WINDOW)
    return visible


@triton.jit
def sees_block(
    at, depth_M, keys, last_ptr, depth_ptr, num_queries, WINDOW: tl.constexpr
):
    """Return [M, N]: which keys of the block the rows see."""
    last_N = tl.load(last_ptr + keys, mask=keys < num_queries, other=0)
    visible = (keys[None, :] <= at[:, None]) & (at[:, None] < last_N[None, :])
    if WINDOW > 0:
        depth_N = tl.load(depth_ptr + keys, mask=keys < num_queries, other=0)
        visible = visible & (depth_M[:, None] - depth_N[None, :] < WINDOW)
    return visible


@triton.jit
def _attend(
    q,
    k,
    v,
    visible,
    highest,
    total,
    out,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take one tile of keys into the running softmax."""
    scores, _ = scores_of(q, k, SCALE, SOFTCAP, UPCAST)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    found = tl.maximum(highest, tl.max(scores, 1))
    shift = found
    if MASKED:  # a row may have seen nothing yet
        shift = tl.where(found == float("-inf"), 0.0, found)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(highest - shift)
    total = total * fade + tl.sum(weights, 1)
    out = out * fade[:, None] + dot(weights.to(v.dtype), v, UPCAST)
    return found, total, out


@triton.jit
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    path_k_ptr,
    path_v_ptr,
    last_ptr,
    depth_ptr,
    list_ptr,
    count_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    path_k_strides,
    path_v_strides,
    out_strides,
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
    """Compute out and lse of one tile of rows. Strides are (of a token, of a head)."""
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    # The last tiles of a block see the most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    at, of_head = rows // GROUP, head * GROUP + rows % GROUP
    columns, column_N = tl.arange(0, PADDED), tl.arange(0, BLOCK_N)
    is_query = at < num_queries
    is_row = is_query[:, None] & (columns < WIDTH)[None, :]
    q = load_rows(q_ptr, at, q_strides, of_head, is_row, columns)
    depth_M = at
    if WINDOW > 0:
        depth_M = tl.load(depth_ptr + at, mask=is_query, other=0)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=ACC)
    total = tl.zeros([BLOCK_M], dtype=ACC)
    out = tl.zeros([BLOCK_M, PADDED], dtype=ACC)

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
        highest, total, out = _attend(
            q, k, v, visible, highest, total, out, SCALE, SOFTCAP, UPCAST, WINDOW > 0
        )
    if num_whole < num_path:
        keys = num_whole + column_N
        k = load_keys(
            path_k_ptr, keys, path_k_strides[0], columns, num_path, WIDTH, False
        )
        v = load_keys(
            path_v_ptr, keys, path_v_strides[0], columns, num_path, WIDTH, False
        )
        visible = sees_path(at, depth_M, keys, num_path, path_start, WINDOW)
        highest, total, out = _attend(
            q, k, v, visible, highest, total, out, SCALE, SOFTCAP, UPCAST, True
        )

    # The block: the tiles that some row sees.
    for n in range(0, tl.load(count_ptr + tile)):
        keys = tl.load(list_ptr + tile * list_stride + n) * BLOCK_N + column_N
        k = load_keys(k_ptr, keys, k_strides[0], columns, num_queries, WIDTH, False)
        v = load_keys(v_ptr, keys, v_strides[0], columns, num_queries, WIDTH, False)
        visible = sees_block(
            at, depth_M, keys, last_ptr, depth_ptr, num_queries, WINDOW
        )
        highest, total, out = _attend(
            q, k, v, visible, highest, total, out, SCALE, SOFTCAP, UPCAST, True
        )

    # Each query sees itself, so only rows beyond the last query have no total.
    total = tl.where(is_query, total, 1.0)
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    at_out = (
        of_head[:, None] * out_strides[1] + at.to(tl.int64)[:, None] * out_strides[0]
    )
    tl.store(out_ptr + at_out + columns[None, :], out, mask=is_row)
    lse = (highest + tl.log2(total)) * LN_2
    tl.store(lse_ptr + of_head * num_queries + at, lse, mask=is_query)
