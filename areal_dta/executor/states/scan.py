"""Scans over the chunks of a block, in plain PyTorch, on any device and in any dtype.

Each is a linear recurrence whose chunks are computed in one batch but for the state
that a chunk receives from the one above it. Sources of the chunked forms: gated delta
rule, arXiv 2412.06464; state-space duality, arXiv 2405.21060. Both work in fp32 (fp64
for fp64), as Transformers' own functions do, and equal them to rounding
(tests/executor/states/test_scan.py).
"""

# S = block tokens, M = chunks, C = tokens of a chunk, N = heads
# K = key dim or state size, V = value dim or head dim

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from areal_dta.executor.kernels import accumulation_dtype
from areal_dta.executor.states.run_tree import ChunkTree


def gated_delta_rule(
    chunks: ChunkTree,
    query_SNK: Tensor,
    key_SNK: Tensor,
    value_SNV: Tensor,
    g_SN: Tensor,
    beta_SN: Tensor,
    entering: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return outputs [S, N, V] in the dtype of the values, and states [.., N, K, V].

    The state decays by exp(g), and at the key the difference between the value and what
    the state has there is written, times beta. A chunk's writes depend on one another:
    one triangular solve per chunk gives them as a function of the state it receives.

    Args:
        entering: state [1, N, K, V] at the top.
    """
    acc = accumulation_dtype(value_SNV.dtype)
    dim_k = key_SNK.shape[-1]
    # One copy into chunks, padded with zeros: nothing decays, nothing is written.
    parts = [query_SNK, key_SNK, value_SNV, g_SN[..., None], beta_SN[..., None]]
    packed = torch.cat([x.to(acc) for x in parts], -1)
    packed_MNCX = chunks.split(packed).transpose(1, 2)
    q, k, v, g, beta = packed_MNCX.split([dim_k, dim_k, value_SNV.shape[-1], 1, 1], -1)
    q = q * dim_k**-0.5

    g = g.cumsum(-2)
    decay_MNCC = _decays(g)
    k_beta = k * beta
    mixed_MNCC = (k_beta @ k.transpose(-1, -2)) * decay_MNCC
    # The solve reads the part below the diagonal only.
    written, erased = torch.linalg.solve_triangular(
        mixed_MNCC, torch.cat([v * beta, k_beta * g.exp()], -1), upper=False,
        unitriangular=True,
    ).split([v.shape[-1], dim_k], -1)  # fmt: skip
    last = g[..., -1:, :]
    keys_MNKC = (k * (last - g).exp()).transpose(-1, -2)
    kept_MN11 = last.exp()

    # Depth by depth: the state that each chunk receives, and what it writes.
    received, writes, left = [], [], []
    state = _entering(entering, dim_k, v)
    depths = _by_depth(chunks, written, erased, kept_MN11, keys_MNKC)
    for above, (new, erases, kept, keys) in depths:
        state = _received(state, above, len(new))
        write = new - erases @ state
        received.append(state)
        writes.append(write)
        state = state * kept + keys @ write
        left.append(state)
    scores_MNCC = (q @ k.transpose(-1, -2)) * decay_MNCC
    out = (q * g.exp()) @ torch.cat(received) + scores_MNCC @ torch.cat(writes)
    return chunks.join(out.transpose(1, 2)).to(value_SNV.dtype), left


def state_space(
    chunks: ChunkTree,
    x_SNV: Tensor,
    log_decay_SN: Tensor,
    b_SNK: Tensor,
    c_SNK: Tensor,
    entering: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return outputs [S, N, V] in the dtype of accumulators, and states [.., N, K, V].

    The state decays by exp(log_decay), b x is added to it, and c reads it.
    """
    acc = accumulation_dtype(x_SNV.dtype)
    dim = b_SNK.shape[-1]
    parts = [x_SNV, log_decay_SN[..., None], b_SNK, c_SNK]
    packed = torch.cat([x.to(acc) for x in parts], -1)
    packed_MNCX = chunks.split(packed).transpose(1, 2)
    x, a, b, c = packed_MNCX.split([x_SNV.shape[-1], 1, dim, dim], -1)

    a = a.cumsum(-2)
    last = a[..., -1:, :]
    added = (b * (last - a).exp()).transpose(-1, -2) @ x
    kept_MN11 = last.exp()
    received, left = [], []
    state = _entering(entering, dim, x)
    for above, (kept, new) in _by_depth(chunks, kept_MN11, added):
        state = _received(state, above, len(new))
        received.append(state)
        state = state * kept + new
        left.append(state)
    scores_MNCC = (c @ b.transpose(-1, -2)) * _decays(a)
    out = (c * a.exp()) @ torch.cat(received) + scores_MNCC @ x
    return chunks.join(out.transpose(1, 2)), left


def _decays(log_MNC1: Tensor) -> Tensor:
    """Return exp of the differences of cumulated logs; 0 above the diagonal."""
    size = log_MNC1.shape[-2]
    ahead_CC = torch.ones(size, size, dtype=torch.bool, device=log_MNC1.device).triu(1)
    difference = log_MNC1 - log_MNC1.transpose(-1, -2)
    return difference.masked_fill(ahead_CC, float("-inf")).exp()


def _entering(entering: Tensor | None, dim_k: int, value_MNCV: Tensor) -> Tensor:
    """Return the state [1, N, K, V] at the top."""
    if entering is not None:
        return entering.to(value_MNCV.dtype)
    num_heads, dim_v = value_MNCV.shape[1], value_MNCV.shape[-1]
    return value_MNCV.new_zeros(1, num_heads, dim_k, dim_v)


def _by_depth(
    chunks: ChunkTree, *parts_M: Tensor
) -> Iterator[tuple[Tensor | None, tuple[Tensor, ...]]]:
    """Yield, per depth, which chunks are above its chunks, and their part of tensors.

    Split once: a slice per depth would have a gradient of the size of the whole each.
    """
    later = [1 if above is None else len(above) for above in chunks.above[1:]]
    sizes = [chunks.num_chunks - sum(later), *later]
    parts = zip(*(x.split(sizes) for x in parts_M), strict=True)
    yield from zip(chunks.above, parts, strict=True)


def _received(state: Tensor, above: Tensor | None, num_chunks: int) -> Tensor:
    """Return the states that the chunks of a depth receive from those above."""
    if above is not None:
        return state.index_select(0, above)
    return state.expand(num_chunks, *state.shape[1:])
