"""Batches as lengths and common prefixes, without tokens: large ones are cheap."""

import numpy as np

from areal_dta.balance import CostModel, Pricing
from areal_dta.schedule import FlopModel
from areal_dta.tree import LeafOrder

COST = CostModel.from_flops(FlopModel(4e7, 2e4, 1.6e7), 1e11)
PRICING = Pricing.of(COST)


def conversations(
    num_prompts: int, num_trajectories: int = 8, num_calls: int = 12, seed: int = 0
) -> tuple[LeafOrder, np.ndarray, np.ndarray]:
    """Shaped like tau2: a system prompt of 4,828 tokens, one sequence a call, four
    tokens of empty thinking before each completion. Returns order, prompts, rows."""
    rng = np.random.default_rng(seed)
    lengths, lcps, prompts, rows = [], [], [], []
    for prompt in range(num_prompts):
        first_turn = int(rng.integers(100, 501))
        for trajectory in range(num_trajectories):
            history, shared = 4828, 4828 if prompt else 0
            if trajectory:
                shared = history + first_turn
            calls = int(rng.integers(num_calls // 2, num_calls * 3 // 2 + 1))
            for call in range(calls):
                asked = history + (int(rng.integers(100, 501)) if call else first_turn)
                completion = int(rng.integers(60, 241))
                lengths.append(asked + 4 + completion)
                lcps.append(shared)
                prompts.append(prompt)
                rows.append(completion)
                shared, history = asked, asked + completion
    return LeafOrder.from_arrays(lengths, lcps), np.array(prompts), np.array(rows)
