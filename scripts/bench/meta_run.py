"""The executor at real sizes without a device: on meta tensors, its bytes counted.

Tensors of PyTorch's meta device have shapes and no data, so a model of any size runs
through the executor here as it would on a GPU, with the same calls of the CUDA flash
kernel. `LiveBytes` counts the storages that are alive after each operator. What an
operator takes for itself (the workspace of flash attention's backward, of GEMMs) is not
seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.executor.attention import LayerAttention
from areal_dta.executor.kernels.flash_cuda import FlashCudaKernel
from areal_dta.tree import PrefixTree


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators under it made and that are alive.

    Args:
        existing: tensors that are not counted, though operators may return them.
    """

    def __init__(self, *existing: Tensor) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._existing = {t.untyped_storage()._cdata for t in existing}
        self._bound = 0  # of the live bytes, from above
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._hold(tensor)
        if self._bound > self.peak:
            self.peak = max(self.peak, self.live)
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._existing:
            return
        known = self._alive.get(key)
        if known is not None and not known[0].expired():
            return
        if known is not None:  # another storage was at this address
            self._bound -= known[1]
        self._alive[key] = StorageWeakRef(storage), storage.nbytes()
        self._bound += storage.nbytes()

    @property
    def live(self) -> int:
        """Bytes alive now."""
        alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self._alive, self._bound = alive, sum(size for _, size in alive.values())
        return self._bound


class _Anything(tuple[Any, ...]):
    """What a layer may ask of attention: equals whatever it asks."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class _NoWatch:
    """Looks on and does nothing: the loss is then not read."""

    inputs = None

    @contextmanager
    def block(self, token_S: Tensor) -> Iterator[None]:
        yield


def _loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
    return logprobs.sum()


def meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model on the meta device, with a gradient for each parameter."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model = model.to(dtype).eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def run_on_meta(
    model: PreTrainedModel, config: ExecutorConfig, tree: PrefixTree, mode: Any
) -> TreeExecutor:
    """Run a training pass over a tree under a dispatch mode, all outputs needed.

    Args:
        model: of `meta_model`, without windows and soft-capping.
    """
    sizes: Any = model.config.get_text_config()
    head_dim = getattr(
        sizes, "head_dim", sizes.hidden_size // sizes.num_attention_heads
    )
    executor = TreeExecutor(model, config)
    executor.layers = dict.fromkeys(
        range(sizes.num_hidden_layers),
        LayerAttention(_Anything(), window=None, scale=head_dim**-0.5, softcap=None),
    )
    executor._is_profiled = executor._knows_last_layer = True
    with (
        mock.patch.object(FlashCudaKernel, "supports", return_value=True),
        # which the meta device does not have
        mock.patch.object(torch, "is_autocast_enabled", return_value=False),
        mode,
    ):
        executor.traverse(tree, _loss, _NoWatch())
    return executor


def peak_bytes(model: PreTrainedModel, config: ExecutorConfig, tree: PrefixTree) -> int:
    """Return the peak of a training pass beside parameters and their gradients."""
    existing = [*model.parameters(), *model.buffers()]
    existing += [p.grad for p in model.parameters() if p.grad is not None]
    counter = LiveBytes(*existing)
    run_on_meta(model, config, tree, counter)
    return counter.peak
