"""Logs of training passes at real sizes: on a tree, and dense over packed sequences.

Dense is what AReaL's FSDP engine does (bench/packed_dense.py): sequences packed end to
end, flash attention with variable lengths, logits at every position, their log-softmax
compiled. Both accumulate gradients as FSDP2 does, in fp32 after every
backward, and pay for AReaL's loss at every call of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from bench.measure import LiveBytes
from bench.packed_dense import PackedAttention, pack
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.executor.attention import LayerAttention
from areal_dta.executor.fused import FusedLayers
from areal_dta.executor.kernels.flash_cuda import Lengths
from areal_dta.executor.last_layer import LastLayer, decoder_layers
from areal_dta.executor.layout import tree_arrays
from areal_dta.inspect.models import FIELDS, SHAPES
from areal_dta.tree import PrefixTree
from projection.op_log import Op, OpLog, Segment
from tests.executor import fake_cuda

_DENSE_ATTENTION = "projection_dense"
_FSDP_BYTES = 10
"""Bytes per parameter and backward pass: a bf16 gradient is read, an fp32 sum read and
written."""
_LOSS_LAUNCHES, _LOSS_SYNCS = 99, 13
"""Launches and synchronisations of AReaL's GRPO loss per call."""

MODELS: dict[str, dict[str, int]] = {
    name.removeprefix("qwen3-"): dict(zip(FIELDS, shape, strict=True))
    for name, shape in SHAPES.items()
    if name.startswith("qwen3-")
}
"""Options of the configuration per size of Qwen3."""
_TIED = ("0.6b", "1.7b", "4b")


def qwen3_config(name: str, num_layers: int) -> Qwen3Config:
    """Return the configuration of a model with so many of its layers."""
    sizes: dict[str, Any] = MODELS[name] | {"num_hidden_layers": num_layers}
    return Qwen3Config(
        **sizes, tie_word_embeddings=name in _TIED, max_position_embeddings=40960
    )


@dataclass(slots=True)
class Pass:
    """What one pass over a batch asks of a GPU."""

    segments: list[Segment]
    peak_bytes: int
    """Activations, K/V, temporaries; no parameters, and no gradients of them."""
    num_calls: int
    """Forwards of the model."""


@contextmanager
def _recording(config: Qwen3Config) -> Iterator[tuple[Any, OpLog, LiveBytes]]:
    """Context manager with a bf16 model on a CUDA device that is not there."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.train()
    log = OpLog()
    with ExitStack() as stack:
        stack.enter_context(fake_cuda.fake_cuda(counts=False))
        # entered last, so that what it restores is not the fake
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        model = fake_cuda.move(model)
        patch.setattr(fake_cuda, "accumulate", _accumulation(log))
        run = torch.autograd.backward

        def backward(roots: Any, grads: Any, inputs: Any = None) -> None:
            log.begin(is_backward=True)
            run(roots, grads, inputs)
            log.begin(is_backward=False)

        patch.setattr(torch.autograd, "backward", backward)
        upload = tree_arrays.upload

        def remembering(arrays: Any, device: torch.device) -> Any:
            sent = upload(arrays, device)
            for key, tensor in sent.items():
                array = arrays[key]
                if isinstance(array, np.ndarray):
                    log.remember(tensor, array)
            return sent

        patch.setattr(tree_arrays, "upload", remembering)
        live = LiveBytes([*model.parameters(), *model.buffers()])
        log.live = live
        with log:
            yield model, log, live


def _accumulation(log: OpLog) -> Callable[[Tensor, Tensor], None]:
    """Return what takes a parameter's gradient, as FSDP2 does: it is added in fp32, and
    gone before the next one."""

    def accumulate(leaf: Tensor, grad: Tensor) -> None:
        if isinstance(leaf, nn.Parameter):
            log.add(Op("accumulate", "fsdp", 0.0, float(_FSDP_BYTES * leaf.numel())))
        else:
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad

    return accumulate


def _loss_op() -> Op:
    return Op("GRPO loss", "loss", launches=_LOSS_LAUNCHES, syncs=_LOSS_SYNCS)


def tree_pass(
    config: Qwen3Config,
    tree: PrefixTree,
    needed: Sequence[np.ndarray] | None,
    options: ExecutorConfig,
) -> Pass:
    """Record the executor on a tree.

    Args:
        needed: the needed outputs, as `TreeExecutor.forward_backward` takes them.
    """
    with _recording(config) as (model, log, live):
        executor = TreeExecutor(model, options)
        # Both are learned by reading values, of which there are none here.
        scale = config.head_dim**-0.5
        layer = LayerAttention((scale, None, None, False), None, scale, None)
        executor.layers = dict.fromkeys(range(config.num_hidden_layers), layer)
        executor.profile = lambda find_randomness: None  # type: ignore[method-assign]
        if not options.whole_last_layer:
            executor._last_layer = LastLayer(
                decoder_layers(model)[-1], config.num_hidden_layers - 1
            )
        executor.fuse()

        def group_loss(indices: list[int], *outputs: list[Tensor]) -> Tensor:
            log.add(_loss_op())
            with log.silent():
                return torch.stack([x.sum() for x in outputs[0]]).sum()

        log.segments.clear()
        log.segments.append(Segment(False))
        live.peak = live.live
        before = live.live
        executor.forward_backward_groups(tree, group_loss, needed)
        assert executor.last_stats is not None
        return Pass(log.segments, live.peak - before, executor.last_stats.num_blocks)


class _CompiledSoftmax(torch.autograd.Function):
    """Logprobs and entropies as AReaL compiles them: three reads of the logits forward
    (maximum, sums, label), a read and a write backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log: OpLog) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.log = log
        size = float(logits.numel() * logits.element_size())
        log.add(
            Op("log-softmax", "element-wise", 0.0, 3 * size, -(-len(logits) // 512))
        )
        with log.silent():
            return logits.new_empty(len(logits), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        size = float(logits.numel() * logits.element_size())
        launches = -(-len(logits) // 1024)
        ctx.log.add(Op("softmax", "element-wise", 0.0, 2 * size, launches))
        with ctx.log.silent():
            return torch.empty_like(logits), None


def dense_pass(
    config: Qwen3Config, lengths: Sequence[int], fused_layers: str = "off"
) -> Pass:
    """Record dense training on sequences of these lengths, one pack after another.

    Args:
        fused_layers: ``on``: with the fused kernels that the executor has.
    """
    current: list[Lengths] = []

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any):
        return PackedAttention.apply(q, k, v, current[-1]), None

    AttentionInterface.register(_DENSE_ATTENTION, attention)
    packs = pack(lengths)
    with _recording(config) as (model, log, live), ExitStack() as stack:
        model.set_attn_implementation(_DENSE_ATTENTION)
        stack.enter_context(FusedLayers(model, fused_layers).active())
        log.segments.clear()
        log.segments.append(Segment(False))
        live.peak = before = live.live
        for indices in packs:
            of_pack = [lengths[i] for i in indices]
            ends = np.cumsum([0, *of_pack], dtype=np.int32)
            with log.silent():
                cumulative = torch.empty(len(ends), dtype=torch.int32, device="cuda")
                log.remember(cumulative, ends)
                tokens = torch.zeros(1, ends[-1], dtype=torch.int64, device="cuda")
            longest = max(of_pack)
            current.append(Lengths(cumulative, cumulative, longest, longest, True))
            hidden = model.model(tokens, position_ids=tokens, use_cache=False)[0][0]
            logits = model.lm_head(hidden)
            logprobs = _CompiledSoftmax.apply(logits, log)
            del logits
            log.add(_loss_op())
            torch.autograd.backward([logprobs], [torch.empty_like(logprobs)])
            del hidden, logprobs
        return Pass(log.segments, live.peak - before, len(packs))
