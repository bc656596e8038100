"""Attention kernels: one term of a block's attention, and the choice among them."""

from __future__ import annotations

from torch import Tensor

from areal_dta.executor.kernels.base import (
    AttentionKernel,
    Gradients,
    Mask,
    PathKeys,
    Scoring,
    Term,
    accumulation_dtype,
    merge,
)
from areal_dta.executor.kernels.flash_cpu import FlashCpuKernel
from areal_dta.executor.kernels.flash_cuda import FlashCudaKernel
from areal_dta.executor.kernels.flash_triton import FlashTritonKernel
from areal_dta.executor.kernels.masked_softmax import MaskedSoftmaxKernel
from areal_dta.executor.kernels.triton_tree import TritonTreeKernel

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "Gradients",
    "Mask",
    "PathKeys",
    "Scoring",
    "Term",
    "accumulation_dtype",
    "merge",
    "select_kernel",
]

KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (
        FlashCpuKernel(),
        FlashCudaKernel(),
        MaskedSoftmaxKernel(),
        TritonTreeKernel(),
        FlashTritonKernel(FlashCudaKernel(), TritonTreeKernel()),
    )
}
"""Kernels by name, in the order in which ``auto`` tries them."""


def select_kernel(
    name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
) -> AttentionKernel:
    """Return the kernel called ``name``, or for ``auto`` the first that can serve.

    Raises:
        ValueError: no kernel has that name, or it cannot take these tensors.
    """
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"kernel={name!r}; expected auto or one of {sorted(KERNELS)}")
    if name == "auto":
        candidates = iter(KERNELS.values())
        return next(c for c in candidates if c.supports(q, k, v, scoring))
    if not KERNELS[name].supports(q, k, v, scoring):
        raise ValueError(
            f"kernel={name!r} cannot take device={q.device.type} with head "
            f"sizes q={q.shape[-1]}, k={k.shape[-1]}, v={v.shape[-1]} and "
            f"softcap={scoring.softcap}; it needs {KERNELS[name].needs}: use auto"
        )
    return KERNELS[name]
