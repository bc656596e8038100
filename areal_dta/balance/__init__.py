"""Which sequences go to which rank, by predicted seconds; numpy and scipy.

* ``partition``: makes candidates, improves them and chooses the plan.
* ``contiguous``, ``packing``, ``first_fit``: candidates; ``local_search``: moves.
* ``cost_model``: seconds of blocks, learned; ``pricing``: seconds of sets of sequences.
* ``minibatches``: whole prompts per optimizer step.
"""

from areal_dta.balance.cost_model import CostModel
from areal_dta.balance.minibatches import minibatches
from areal_dta.balance.partition import Plan, partition
from areal_dta.balance.pricing import Pricing

__all__ = ["CostModel", "Plan", "Pricing", "minibatches", "partition"]
