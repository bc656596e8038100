"""Runs a schedule on a Hugging Face model. Needs torch and transformers, not areal."""

from areal_dta.executor.config import ExecutionStats, ExecutorConfig
from areal_dta.executor.model_support import (
    UnsupportedModelError,
    check_model_supported,
)
from areal_dta.executor.reference import SequenceLoss, SequenceOutput
from areal_dta.executor.tree_executor import GroupLoss, TreeExecutor

__all__ = [
    "ExecutionStats",
    "ExecutorConfig",
    "GroupLoss",
    "SequenceLoss",
    "SequenceOutput",
    "TreeExecutor",
    "UnsupportedModelError",
    "check_model_supported",
]
