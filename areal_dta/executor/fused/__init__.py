"""RMSNorm, SwiGLU and rotary embeddings of a model as one kernel each, on a GPU."""

from __future__ import annotations

from areal_dta.executor.fused.layers import FUSED_LAYERS, FusedLayers
from areal_dta.executor.fused.operators import LAUNCHES, rms_norm, rotate, swiglu

__all__ = [
    "FUSED_LAYERS",
    "LAUNCHES",
    "FusedLayers",
    "rms_norm",
    "rotate",
    "swiglu",
]
