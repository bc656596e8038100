"""What to run and when for one tree, as plain data: no torch."""

from areal_dta.schedule.block_features import (
    FORWARD,
    TRAINING,
    BlockFeatures,
    BlockSample,
    schedule_features,
    step_features,
    step_kind,
)
from areal_dta.schedule.flops import FlopModel
from areal_dta.schedule.fragments import Fragment, Fragmentation, Segment, cut_tree
from areal_dta.schedule.memory import MemoryModel
from areal_dta.schedule.needed_outputs import NeededOutputs
from areal_dta.schedule.retention import PartialGraph
from areal_dta.schedule.rounds import Round, merge_rounds, operations
from areal_dta.schedule.schedule import (
    DEFAULT_BLOCK_TOKENS,
    Schedule,
    Step,
    StepKind,
    build_schedule,
)

__all__ = [
    "DEFAULT_BLOCK_TOKENS",
    "FORWARD",
    "TRAINING",
    "BlockFeatures",
    "BlockSample",
    "FlopModel",
    "Fragment",
    "Fragmentation",
    "MemoryModel",
    "NeededOutputs",
    "PartialGraph",
    "Round",
    "Schedule",
    "Segment",
    "Step",
    "StepKind",
    "build_schedule",
    "cut_tree",
    "merge_rounds",
    "operations",
    "schedule_features",
    "step_features",
    "step_kind",
]
