"""Prices and batches that the tests of this package share."""

from bench.dispatch_batches import conversations

from areal_dta.balance import CostModel, Pricing
from areal_dta.schedule import FlopModel

__all__ = ["COST", "PRICING", "conversations"]

COST = CostModel.from_flops(FlopModel(4e7, 2e4, 1.6e7), 1e11)
PRICING = Pricing.from_cost_model(COST)
