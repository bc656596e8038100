"""Which sequences go to which rank, by predicted seconds: no torch."""

from areal_dta.balance.cost_model import CostModel
from areal_dta.balance.minibatches import micro_batches, minibatches
from areal_dta.balance.partition import Plan, partition
from areal_dta.balance.pricing import Pricing

__all__ = [
    "CostModel",
    "Plan",
    "Pricing",
    "micro_batches",
    "minibatches",
    "partition",
]
