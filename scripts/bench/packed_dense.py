"""Dense training as AReaL's FSDP engine does it, and the tree as `auto` runs it.

Dense packs sequences end to end up to `PACK_TOKENS`, attends with variable lengths,
makes logits at every position in one product and takes their log-softmax 1,024 rows at
a time, compiled on a GPU. AReaL cuts those rows by slices, whose backward fills all
logits with zeros once per slice; here they are split, which costs one copy.

Both add every backward's gradients to sums in fp32, as FSDP2 does, which is what a pass
over a model's gradients costs.
"""

# S = tokens of a pack, C = those of a chunk, V = vocabulary
# N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from areal_dta.executor import ExecutorConfig
from areal_dta.executor.attention import model_attention
from areal_dta.executor.kernels import KERNELS
from areal_dta.executor.kernels.flash_cuda import FlashCudaKernel, Lengths
from areal_dta.executor.memory.budget import (
    MAX_BLOCK_TOKENS,
    MIN_CHOSEN_BLOCK,
    choose_budgets,
    predict_memory,
    usable_memory,
)
from bench.variants import RunCounts, Tree, Variant
from bench.workloads import Work

PACK_TOKENS = 32768
_ROWS = 1024
_ATTENTION = "bench_packed_dense"
_lengths: list[Lengths] = []
"""Lengths in the pack that runs; the attention function gets nothing of ours."""


def pack(lengths: Sequence[int], max_tokens: int = PACK_TOKENS) -> list[list[int]]:
    """Return indices of sequences in packs, longest first, each in the first that has
    room."""
    packs: list[list[int]] = []
    sizes: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for at, size in enumerate(sizes):
            if size + lengths[index] <= max_tokens:
                packs[at].append(index)
                sizes[at] += lengths[index]
                break
        else:
            packs.append([index])
            sizes.append(lengths[index])
    return packs


class PackedAttention(torch.autograd.Function):
    """Flash attention of packed sequences; q, out: [1, N, S, H] and [1, S, N, H]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Tensor:
        kernel, scale = KERNELS["flash_cuda"], q.shape[-1] ** -0.5
        assert isinstance(kernel, FlashCudaKernel)
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        out, lse = kernel.attend(*packed, lengths, scale)
        ctx.save_for_backward(*packed, out, lse)
        ctx.lengths, ctx.scale, ctx.kernel = lengths, scale, kernel
        return out[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = ctx.saved_tensors
        found = ctx.kernel.attend_backward(grads[0][0], *saved, ctx.lengths, ctx.scale)
        return *(x.transpose(0, 1)[None] for x in found), None


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    lengths = _lengths[-1]
    if q.device.type == "cuda":
        return PackedAttention.apply(q, k, v, lengths), None
    # On a CPU, for tests of the benchmark: one sequence at a time.
    ends = lengths.cumulative_q.tolist()
    outs = [
        scaled_dot_product_attention(
            *(x[:, :, a:b] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        for a, b in zip(ends, ends[1:], strict=False)
    ]
    return torch.cat(outs, 2).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)


@contextmanager
def accumulation_in_fp32(model: nn.Module) -> Iterator[None]:
    """Context manager in which gradients are added up in fp32 after each backward; at
    its end they are in ``.grad``, in the parameters' dtype."""
    sums: dict[Tensor, Tensor] = {}

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter in sums:
            sums[parameter] += parameter.grad
        else:
            sums[parameter] = parameter.grad.float()
        parameter.grad = None

    handles = [
        p.register_post_accumulate_grad_hook(add)
        for p in model.parameters()
        if p.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, total in sums.items():
            parameter.grad = total.to(parameter.dtype)


def _outputs(logits_CV: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs of labels, and entropies; as AReaL computes them."""
    logp_CV = logits_CV.float().log_softmax(-1)
    entropy_C = -(logp_CV.exp() * logp_CV).sum(-1)
    return logp_CV.gather(-1, label_C[:, None]).squeeze(-1), entropy_C


_compiled_outputs = functools.cache(lambda: torch.compile(_outputs))


class PackedDense(Variant):
    """Packs of whole sequences, logits at every position."""

    def run(self, work: Work) -> RunCounts:
        packs = pack(work.lengths)
        with (
            model_attention(self._model, _ATTENTION),
            accumulation_in_fp32(self._model),
        ):
            for of_pack in packs:
                self._train(work, of_pack)
        return RunCounts(len(packs), sum(work.lengths))

    def _train(self, work: Work, of_pack: list[int]) -> None:
        lengths = [work.lengths[i] for i in of_pack]
        ends = np.cumsum([0, *lengths])
        cumulative = torch.from_numpy(ends.astype(np.int32)).to(work.device)
        longest = max(lengths)
        _lengths.append(Lengths(cumulative, cumulative, longest, longest, True))
        tokens_S = torch.cat([work.tokens[i] for i in of_pack])
        depth_S = torch.cat([torch.arange(n, device=work.device) for n in lengths])
        model: Any = self._model
        hidden = model.model(
            tokens_S[None], position_ids=depth_S[None], use_cache=False
        )[0][0]
        _lengths.pop()
        # One label per row; those of last tokens are not read.
        logits_SV, label_S = model.lm_head(hidden), tokens_S.roll(-1)
        outputs = _compiled_outputs() if logits_SV.is_cuda else _outputs
        parts = map(outputs, logits_SV.split(_ROWS), label_S.split(_ROWS))
        logprobs, entropy = map(torch.cat, zip(*parts, strict=True))
        losses = [
            work.loss(i, logprobs[start : end - 1], entropy[start : end - 1])
            for i, start, end in zip(of_pack, ends, ends[1:], strict=False)
        ]
        torch.stack(losses).sum().backward()

    def min_flops(self, work: Work) -> float:
        return self._flops.dense(work.lengths)


class AutoTree(Tree):
    """The executor with the budgets that `auto` chooses for the device."""

    def __init__(self, name: str, model: Any) -> None:
        super().__init__(name, model, ExecutorConfig(), True)
        self._longest = 0

    def run(self, work: Work) -> RunCounts:
        if max(work.lengths) > self._longest:  # as the engine does
            self._longest = max(work.lengths)
            self._executor.config = self.choose(work)
        with accumulation_in_fp32(self._model):
            return super().run(work)

    def choose(self, work: Work) -> ExecutorConfig:
        """Return the options for the longest sequence and the free memory."""
        device = work.device
        config = ExecutorConfig()
        sums = 4.0 * sum(p.numel() for p in self._model.parameters())
        budgets = choose_budgets(
            predict_memory(self._model, config),
            usable_memory(device) - sums,
            max(work.lengths),
            MAX_BLOCK_TOKENS[device.type],
            MIN_CHOSEN_BLOCK[device.type],
            recompute="auto",
        )
        return budgets.apply(config)
