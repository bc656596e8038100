"""Attention over one set of keys, with its log-sum-exp, forward and backward."""

from areal_dta.executor.kernels.base import (
    AttentionBackend,
    Gradients,
    Mask,
    Scoring,
    accumulation_dtype,
    merge,
)
from areal_dta.executor.kernels.select import BACKENDS, select_backend

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "Gradients",
    "Mask",
    "Scoring",
    "accumulation_dtype",
    "merge",
    "select_backend",
]
