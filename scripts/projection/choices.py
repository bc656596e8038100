"""Kernels that a GPU would run in place of several, as they change the log.

Where the executor has such a kernel, it cannot run on fake tensors: what it launches
and moves is written down here instead. None of this computes anything.
"""

# S = tokens, D = width, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_dta.executor import attention
from areal_dta.executor.kernels.base import Term
from areal_dta.executor.kernels.flash_cuda import FlashCudaKernel
from projection.op_log import Op, OpLog
from tests.executor import fake_cuda


def _size(*tensors: Tensor) -> float:
    return float(sum(x.numel() * x.element_size() for x in tensors))


class _Fused(torch.autograd.Function):
    """One kernel forward and one backward over a few tensors, the first of which has
    the shape of the result."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, log, name = args  # tensors first, as the walk of the graph expects
        ctx.log, ctx.name = log, name
        ctx.save_for_backward(*inputs)
        with log.silent():
            out = torch.empty_like(inputs[0])
        log.add(Op(name, "element-wise", 0.0, _size(*inputs, out)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = ctx.saved_tensors
        log: OpLog = ctx.log
        with log.silent():
            found = [torch.empty_like(x) for x in inputs]
        moved = _size(grads[0], *inputs, *found)
        log.add(Op(ctx.name, "element-wise", 0.0, moved, 2))
        return *found, None, None


def fuse(model: Any, log: OpLog) -> None:
    """RMSNorm, SwiGLU and RoPE in one kernel each, as Liger's do."""
    from transformers.models.qwen3 import modeling_qwen3

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = _norm_forward(module, log)
        elif kind.endswith("MLP"):
            module.forward = _mlp_forward(module, log)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any):
        return _Fused.apply(q, log, "rope"), _Fused.apply(k, log, "rope")

    log.patches.append((modeling_qwen3, "apply_rotary_pos_emb", rotate))


def _norm_forward(module: Any, log: OpLog) -> Any:
    def forward(hidden: Tensor) -> Tensor:
        return _Fused.apply(hidden, module.weight, log, "rms norm")

    return forward


def _mlp_forward(module: Any, log: OpLog) -> Any:
    def forward(hidden: Tensor) -> Tensor:
        gate, up = module.gate_proj(hidden), module.up_proj(hidden)
        return module.down_proj(_Fused.apply(gate, up, log, "swiglu"))

    return forward


def tree_kernel(model: Any, log: OpLog) -> None:
    """`kernel=triton_tree`: path and block in one call forward and two kernels
    backward, no levels, no merges; at the rates of flash attention, which are not its
    own."""
    log.patches.append((attention._LayerCall, "terms", _terms_in_one))
    log.patches.append((FlashCudaKernel, "forward", _forward(log)))
    log.patches.append((FlashCudaKernel, "backward", _backward(log)))


def _terms_in_one(call: Any, k: Tensor, v: Tensor) -> list[tuple[int, Term]]:
    """Path and block as one set of keys, whatever the form of the block."""
    num_path = call.path_end - call.path_start
    if not num_path:
        return [(0, Term(k, v, call.block_mask, call.scoring))]
    both = call.layer.extended(call.path_start, call.path_end, k, v)
    return [(num_path, Term(*both, call.block_mask, call.scoring))]


def _work(q: Tensor, term: Term, products: int) -> tuple[float, float]:
    """Return FLOPs and bytes of a call that computes visible pairs only."""
    shape, num_queries = term.mask.shape, q.shape[2]
    num_keys = term.k.shape[2]
    pairs = float(num_queries * num_keys)
    if shape is not None:  # each key is seen by its subtree
        own = sum(
            (end - start) * (end - start + 1) / 2 for start, end in shape.run_ranges
        )
        own += sum(
            (q_end - q_start) * (k_end - k_start)
            for level in shape.levels
            for (q_start, q_end), (k_start, k_end) in zip(
                level.queries, level.keys, strict=True
            )
        )
        pairs = own + num_queries * (num_keys - shape.num_tokens)
    flops = 2.0 * products * pairs * q.shape[1] * q.shape[3]
    return flops, _size(q, q, term.k, term.v)


def _forward(log: OpLog) -> Any:
    def forward(kernel: Any, q: Tensor, term: Term) -> tuple[Tensor, Tensor]:
        with log.silent():
            out = torch.empty_like(q)
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        flops, moved = _work(q, term, 2)
        tiles = -(-q.shape[2] // 128) * q.shape[1]
        log.add(Op("tree_forward", "tree attention", flops, moved, tiles=float(tiles)))
        return out, lse

    return forward


def _backward(log: OpLog) -> Any:
    def backward(
        kernel: Any, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, term: Term
    ) -> Any:
        with log.silent():
            grads = (
                torch.empty_like(q),
                torch.empty_like(term.k, dtype=torch.float32),
                torch.empty_like(term.v, dtype=torch.float32),
            )
        flops, moved = _work(q, term, 7)  # scores twice: dq, and dk with dv
        moved += _size(grad_out, out, *grads)
        tiles = -(-term.k.shape[2] // 128) * term.k.shape[1]
        op = Op("tree_backward", "tree attention", flops, moved, 2, tiles=float(tiles))
        log.add(op)
        return grads

    return backward


class _Recomputed(torch.autograd.Function):
    """A module whose graph is made anew in the backward, from its input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, run: Any) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(hidden)
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(hidden)
        # Gradients of parameters are taken here, as those of leaves always are.
        fake_cuda.backward([out], [grads[0]])
        return hidden.grad, None


def recompute_mlp(model: Any, log: OpLog) -> None:
    """MLPs and norms of hidden states run again in the backward; attention is
    untouched."""
    for name, module in model.named_modules():
        is_norm = name.endswith("layernorm")
        if is_norm or type(module).__name__.endswith("MLP"):
            module.forward = _recomputed_forward(module.forward)


def _recomputed_forward(own: Any) -> Any:
    def forward(hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return own(hidden)
        return _Recomputed.apply(hidden, own)

    return forward
