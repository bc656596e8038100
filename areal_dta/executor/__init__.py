"""Run a schedule on a Hugging Face model. Needs torch and transformers, not areal."""

import sys

from areal_dta.executor import oracle
from areal_dta.executor.config import ExecutionStats, ExecutorConfig
from areal_dta.executor.model_refusals import (
    UnsupportedModelError,
    check_model_supported,
)
from areal_dta.executor.oracle import SequenceLoss, SequenceOutput, ValueOutput
from areal_dta.executor.traversal import GroupLoss
from areal_dta.executor.tree_executor import Positions, TreeExecutor

__all__ = [
    "ExecutionStats",
    "ExecutorConfig",
    "GroupLoss",
    "Positions",
    "SequenceLoss",
    "SequenceOutput",
    "TreeExecutor",
    "UnsupportedModelError",
    "ValueOutput",
    "check_model_supported",
    "oracle",
    "reference",
]

# The name of the oracle in 0.1, as attribute and as module.
reference = sys.modules[f"{__name__}.reference"] = oracle
