"""What to run and when, as plain data: fragments, schedule, FLOPs. No torch."""

from areal_dta.plan.cost_model import CostModel
from areal_dta.plan.features import (
    FORWARD,
    TRAINING,
    BlockFeatures,
    BlockSample,
    schedule_features,
    step_features,
    step_kind,
)
from areal_dta.plan.flops import FlopModel
from areal_dta.plan.fragments import Fragment, Fragmentation, Segment, cut_tree
from areal_dta.plan.memory import MemoryModel
from areal_dta.plan.minibatches import micro_batches, minibatches
from areal_dta.plan.partition import Plan, partition
from areal_dta.plan.pricing import Pricing
from areal_dta.plan.reads import Reads
from areal_dta.plan.rounds import Round, merge_rounds, operations
from areal_dta.plan.schedule import (
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
    "CostModel",
    "FlopModel",
    "Fragment",
    "Fragmentation",
    "MemoryModel",
    "Plan",
    "Pricing",
    "Reads",
    "Round",
    "Schedule",
    "Segment",
    "Step",
    "StepKind",
    "build_schedule",
    "cut_tree",
    "merge_rounds",
    "micro_batches",
    "minibatches",
    "operations",
    "partition",
    "schedule_features",
    "step_features",
    "step_kind",
]
