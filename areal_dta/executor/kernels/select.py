"""Which backend serves a call: by device, and by what the model asks for."""

from __future__ import annotations

from torch import Tensor

from areal_dta.executor.kernels.base import AttentionBackend, Mask, Scoring
from areal_dta.executor.kernels.flash_cpu import FlashCpuBackend
from areal_dta.executor.kernels.flash_cuda import FlashCudaBackend
from areal_dta.executor.kernels.masked_softmax import ReferenceBackend

BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend
    for backend in (FlashCpuBackend(), FlashCudaBackend(), ReferenceBackend())
}


def select_backend(
    name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, path_mask: Mask
) -> AttentionBackend:
    """The backend called ``name``, or for ``auto`` the first that can do the job.

    Sliding windows go to the reference: a query may see nothing of the path, which
    flash kernels do not take.

    Raises:
        ValueError: no backend of that name, or it cannot take these tensors.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(
            f"attention_backend={name!r}; expected auto or one of {sorted(BACKENDS)}"
        )
    reference = BACKENDS[ReferenceBackend.name]
    if path_mask.matrix is not None:
        return reference
    if name == "auto":
        candidates = iter(BACKENDS.values())
        return next(b for b in candidates if b.supports(q, k, v, scoring))
    if not BACKENDS[name].supports(q, k, v, scoring):
        raise ValueError(
            f"attention_backend={name!r} cannot take device={q.device.type} with head "
            f"sizes q={q.shape[-1]}, k={k.shape[-1]}, v={v.shape[-1]} and "
            f"softcap={scoring.softcap}; use auto"
        )
    return BACKENDS[name]
