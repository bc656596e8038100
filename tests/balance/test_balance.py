"""What has to hold on tau2-shaped batches: balance, and little that is repeated.

With as few as 30 sequences a rank, which is two or three conversations. The limits are
those of ``partition``; where bounds rule them out, plans are near the bounds.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from areal_dta.balance import partition
from areal_dta.balance.packing import min_makespan
from areal_dta.balance.partition import MAX_IMBALANCE, MAX_TOTAL
from areal_dta.balance.pricing import RangePrices, outputs_in_order
from areal_dta.tree import LeafOrder, PrefixTree
from tests.balance.bounds import min_total
from tests.balance.shapes import PRICING, conversations

TRAJECTORIES = Path(__file__).parents[2] / "../shared/data/tau2/trajectories.jsonl"
SHAPES = [
    (prompts, num_ranks, seed)
    for prompts, ranks in {8: (2, 4, 8, 16, 24, 25), 32: (2, 8, 32, 64, 96)}.items()
    for num_ranks in ranks
    for seed in (0, 1)
]


def cheapest(plan):
    return min(candidate.total_seconds for candidate in plan.candidates)


@pytest.fixture(scope="module")
def planned():
    result = {}
    for num_prompts, num_ranks, seed in SHAPES:
        order, prompts, rows = conversations(num_prompts, seed=seed)
        assert len(order) >= 30 * num_ranks
        plan = partition(order, num_ranks, PRICING, rows, prompts)
        result[num_prompts, num_ranks, seed] = plan
    return result


def test_ranks_are_balanced(planned):
    worst = {key: plan.imbalance for key, plan in planned.items()}
    assert max(worst.values()) <= MAX_IMBALANCE, worst


def test_little_is_repeated(planned):
    totals = {k: sum(p.predicted_seconds) / cheapest(p) for k, p in planned.items()}
    assert max(totals.values()) <= MAX_TOTAL, totals


def test_faster_than_first_fit_by_tree_tokens(planned):
    gains = [
        next(c for c in plan.candidates if c.method == "tree_tokens").makespan_seconds
        / plan.makespan_seconds
        for (_, num_ranks, _), plan in planned.items()
        if num_ranks >= 8
    ]
    assert np.mean(gains) >= 1.05


@pytest.mark.parametrize(
    ("num_prompts", "num_ranks", "at_least"), [(1050, 256, 100_000), (200, 630, 18_900)]
)
def test_many_sequences_on_many_ranks(num_prompts, num_ranks, at_least):
    order, prompts, rows = conversations(num_prompts)
    assert len(order) >= at_least
    plan = partition(order, num_ranks, PRICING, rows, prompts)
    assert plan.imbalance <= MAX_IMBALANCE
    assert sum(plan.predicted_seconds) <= MAX_TOTAL * cheapest(plan)
    assert len({s for part in plan.assignments for s in part}) == len(order)


@pytest.mark.parametrize("num_trajectories", [1, 4, 16])
@pytest.mark.parametrize("num_calls", [4, 12, 20])
def test_other_shapes_are_balanced(num_trajectories, num_calls):
    order, prompts, rows = conversations(16, num_trajectories, num_calls)
    plan = partition(order, max(2, len(order) // 30), PRICING, rows, prompts)
    assert plan.imbalance <= MAX_IMBALANCE
    # long episodes cannot share a rank; splitting them is what costs
    most = MAX_TOTAL if num_calls <= 12 else 1.07
    assert sum(plan.predicted_seconds) <= most * cheapest(plan)


# ---- recorded episodes


@pytest.fixture(scope="module")
def airline():
    """512 sequences of 20 tasks, one a call: order, rows, groups."""
    if not TRAJECTORIES.exists() or not find_spec("tau2"):
        pytest.skip("needs the shared data and the extra tau2")
    if not find_spec("qwen_agent"):
        pytest.skip("needs the tokenizer's file, which qwen_agent has")
    from recipes.tau2.recorded.qwen_tokenizer import load_tokenizer
    from recipes.tau2.recorded.trajectories import read_trajectories
    from recipes.tau2.recorded.turns import Template
    from recipes.tau2.replay import replay

    batch = replay(
        read_trajectories(TRAJECTORIES, ["airline"]),
        load_tokenizer(None),
        template=Template.EMPTY_THINK,
        max_sequences=512,
    )
    ends = batch.offsets[1:-1]
    masks = np.split(batch.loss_mask, ends)
    tree = PrefixTree.from_sequences(np.split(batch.tokens, ends))
    # nothing is computed below the last output that is read
    lengths = [int(np.flatnonzero(mask)[-1]) for mask in masks]
    rows = np.array([int(mask.sum()) for mask in masks])
    groups = np.unique(batch.task_id, return_inverse=True)[1].reshape(-1)
    return LeafOrder.from_tree(tree, lengths), rows, groups


def plan_and_prices(airline, num_ranks):
    order, rows, groups = airline
    prices = RangePrices(PRICING, order, outputs_in_order(order, rows))
    return partition(order, num_ranks, PRICING, rows, groups), prices


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8, 10])
def test_recorded_episodes_are_balanced(airline, num_ranks):
    plan, _ = plan_and_prices(airline, num_ranks)
    assert plan.imbalance <= MAX_IMBALANCE
    assert sum(plan.predicted_seconds) <= MAX_TOTAL * cheapest(plan)


@pytest.mark.parametrize("num_ranks", [11, 12])
def test_episodes_that_have_to_be_split_cost_what_they_must(airline, num_ranks):
    plan, prices = plan_and_prices(airline, num_ranks)
    most = MAX_IMBALANCE * MAX_TOTAL * cheapest(plan) / num_ranks
    least = min_total(PRICING, airline[0], prices, num_ranks, most)
    assert MAX_TOTAL * cheapest(plan) < least < np.inf  # both limits: impossible
    assert plan.imbalance <= MAX_IMBALANCE
    assert plan.makespan_seconds <= most
    assert sum(plan.predicted_seconds) <= 1.02 * least


def test_no_plan_is_faster_than_the_longest_sequence(airline):
    plan, prices = plan_and_prices(airline, 16)
    least = min_makespan(PRICING, airline[0], prices, 16)
    share = cheapest(plan) / 16
    assert least > MAX_IMBALANCE * MAX_TOTAL * share  # both limits: impossible
    assert plan.makespan_seconds == pytest.approx(least, rel=1e-3)
