"""The cost model on blocks with known costs, noise, hiccups and changes of speed."""

import dataclasses
import json

import numpy as np
import pytest

from areal_dta.balance import CostModel
from areal_dta.schedule import (
    FORWARD,
    TRAINING,
    BlockFeatures,
    BlockSample,
    FlopModel,
    build_schedule,
    schedule_features,
)
from areal_dta.schedule.block_features import SAMPLE_FLOATS, samples_from_array
from tests.builders import make_tree

FLOPS = FlopModel(per_token=4e7, per_pair=2e4, per_output=1.6e7)
# Seconds that FLOPs do not tell: a large overhead, attention three times as slow.
TRUE = {
    TRAINING: np.array([4e-3, 3e-5, 0.0, 4e-9, 6e-6, 2e-8, 0.0]),
    FORWARD: np.array([2e-3, 0.0, 1e-5, 1e-9, 2e-6, 0.0, 0.0]),
}


def blocks(rng, num_blocks, kind=TRAINING):
    result = []
    for _ in range(num_blocks):
        num_tokens = int(rng.choice([512, rng.integers(8, 512)]))
        depth = int(rng.integers(0, 16_000))
        rows = int(rng.integers(0, num_tokens // 4 + 1))
        end = depth + num_tokens
        pairs = (end * (end + 1) - depth * (depth + 1)) // 2
        grad = kind == TRAINING
        loss = int(rng.integers(0, 4)) * end * grad
        result.append(
            BlockFeatures(
                1, num_tokens * grad, num_tokens * (not grad), pairs, rows, loss
            )
        )
    return result


def measured(rng, features, kind=TRAINING, speed=1.0, noise=0.05, outliers=0.1):
    result = []
    for f in features:
        seconds = float(TRUE[kind] @ f.as_tuple()) * speed
        seconds *= float(np.exp(rng.normal(0, noise)))
        if rng.random() < outliers:
            seconds *= 10
        result.append(BlockSample(f, seconds, kind))
    return result


def clean(features, kind=TRAINING, speed=1.0):
    rng = np.random.default_rng(0)
    return measured(rng, features, kind, speed, noise=0.0, outliers=0.0)


def test_it_starts_from_flops():
    model = CostModel.from_flops(FLOPS, flops_per_second=1e12)
    c = model.coefficients(TRAINING)
    assert c.per_grad_token == pytest.approx(3 * 4e7 / 1e12)
    assert c.per_pair == pytest.approx(3 * 2e4 / 1e12)
    assert c.per_output == pytest.approx(3 * 1.6e7 / 1e12)
    forward = model.coefficients(FORWARD)
    assert forward.per_no_grad_token == pytest.approx(4e7 / 1e12)
    assert forward.per_loss_token == 0
    features = BlockFeatures(2, 10, 0, 100, 3, 0)
    expected = 2 * c.per_block + 10 * c.per_grad_token + 100 * c.per_pair
    assert model.seconds(features) == pytest.approx(expected + 3 * c.per_output)


@pytest.mark.parametrize("kind", [TRAINING, FORWARD])
@pytest.mark.parametrize("seed", range(5))
def test_fifty_blocks_with_outliers_are_enough(kind, seed):
    rng = np.random.default_rng(seed)
    model = CostModel.from_flops(FLOPS)  # and 100 times too fast or slow is no matter
    model.observe(measured(rng, blocks(rng, 50, kind), kind))
    assert model.num_samples(kind) == 50
    assert model.median_error(clean(blocks(rng, 200, kind), kind)) < 0.1


@pytest.mark.parametrize("speed", [0.3, 1.5, 4.0])
@pytest.mark.parametrize("num_in_call", [1, 50])
def test_fifty_blocks_after_a_change_of_speed_are_enough(speed, num_in_call):
    rng = np.random.default_rng(1)
    model = CostModel.from_flops(FLOPS)
    model.observe(measured(rng, blocks(rng, 800)))
    after = measured(rng, blocks(rng, 50), speed=speed)
    for i in range(0, 50, num_in_call):
        model.observe(after[i : i + num_in_call])
    assert model.median_error(clean(blocks(rng, 200), speed=speed)) < 0.1


def test_both_kinds_are_learned_apart():
    rng = np.random.default_rng(2)
    model = CostModel.from_flops(FLOPS)
    model.observe(measured(rng, blocks(rng, 100)))
    before = model.coefficients(FORWARD)
    assert before == CostModel.from_flops(FLOPS).coefficients(FORWARD)
    model.observe(measured(rng, blocks(rng, 100, FORWARD), FORWARD))
    held_out = blocks(rng, 50, FORWARD)
    assert model.median_error(clean(held_out, FORWARD)) < 0.1
    assert (model.coefficients(FORWARD).as_array() >= 0).all()


def test_what_blocks_do_not_tell_apart_keeps_the_ratio_of_flops():
    # no rows in any block: their price follows the speed that was measured
    model = CostModel.from_flops(FLOPS, flops_per_second=1e11)
    ten_times_slower = CostModel.from_flops(FLOPS, flops_per_second=1e10)
    features = [BlockFeatures(1, n, 0, n * n, 0, 0) for n in range(10, 500, 10)]
    model.observe(
        [BlockSample(f, ten_times_slower.seconds(f), TRAINING) for f in features]
    )
    expected = ten_times_slower.coefficients().per_output
    assert model.coefficients().per_output == pytest.approx(expected, rel=1e-3)


def test_useless_samples_are_counted_and_left_out():
    model = CostModel.from_flops(FLOPS)
    f = BlockFeatures(1, 8, 0, 36, 0, 0)
    bad = [float("nan"), float("inf"), 0.0, -1.0]
    model.observe([BlockSample(f, seconds, TRAINING) for seconds in bad])
    model.observe([BlockSample(BlockFeatures(0, 0, 0, 0, 0, 0), 1.0, TRAINING)])
    assert model.num_rejected == 5 and model.num_samples() == 0
    model.observe([])
    assert model.coefficients() == CostModel.from_flops(FLOPS).coefficients()


def test_rows_in_an_array_say_the_same_as_samples():
    rng = np.random.default_rng(3)
    samples = measured(rng, blocks(rng, 30))
    samples += measured(rng, blocks(rng, 30, FORWARD), FORWARD)
    rows = np.array([s.to_floats() for s in samples])
    assert rows.shape == (60, SAMPLE_FLOATS)
    assert samples_from_array(rows) == samples
    one, other = CostModel.from_flops(FLOPS), CostModel.from_flops(FLOPS)
    one.observe(samples)
    other.observe(rows)
    for kind in (TRAINING, FORWARD):
        assert one.coefficients(kind) == other.coefficients(kind)


def test_the_window_is_bounded_and_a_large_call_is_thinned_evenly():
    rng = np.random.default_rng(4)
    model = CostModel.from_flops(FLOPS, window=100)
    for _ in range(3):
        model.observe(clean(blocks(rng, 70)))
        assert model.num_samples() <= 100
    first, second = blocks(rng, 500), blocks(rng, 500)
    # two trainers, one twice as slow: both are heard
    model.observe([*clean(first), *clean(second, speed=2.0)])
    assert model.num_samples() == 100
    fast, slow = (model.median_error(clean(blocks(rng, 99), speed=s)) for s in (1, 2))
    assert fast < 0.6 and slow < 0.6


def test_a_saved_model_goes_on_as_if_nothing_had_happened():
    rng = np.random.default_rng(5)
    model = CostModel.from_flops(FLOPS, window=300)
    model.observe(measured(rng, blocks(rng, 120)))
    state = json.loads(json.dumps(model.state_dict()))
    restored = CostModel.from_flops(FlopModel(1, 1, 1))
    restored.load_state_dict(state)
    more = measured(rng, blocks(rng, 250), speed=2.0)
    for m in (model, restored):
        m.observe(more)
    assert restored.window == 300 and restored.num_samples() == 300
    assert restored.coefficients() == model.coefficients()


def test_segments_cost_what_a_scan_pads_them_with():
    rng = np.random.default_rng(8)
    hybrid = dataclasses.replace(FLOPS, scan_per_token=1e7)
    model = CostModel.from_flops(hybrid, flops_per_second=1e12)
    prior = model.coefficients().per_segment
    assert prior == pytest.approx(3 * 16 * 1e7 / 1e12)
    assert CostModel.from_flops(FLOPS).coefficients().per_segment == 0
    features = [
        dataclasses.replace(f, num_segments=int(rng.integers(1, 40)))
        for f in blocks(rng, 100)
    ]
    samples = [
        dataclasses.replace(s, seconds=s.seconds + 1e-3 * s.features.num_segments)
        for s in clean(features)
    ]
    model.observe(samples)
    # without states there is nothing to pad, whatever was measured
    plain = CostModel.from_flops(FLOPS)
    plain.observe(samples)
    assert plain.coefficients().per_segment == 0
    assert model.median_error(samples) < 0.1 < plain.median_error(samples)


def test_a_state_of_0_1_0_goes_on_without_segments():
    rng = np.random.default_rng(9)
    model = CostModel.from_flops(FLOPS)
    model.observe(measured(rng, blocks(rng, 120)))
    state = json.loads(json.dumps(model.state_dict()))
    for fit in state["kinds"].values():
        assert fit["prior"].pop() == 0
        fit["rows"] = [[*row[:6], row[7]] for row in fit["rows"]]
    state["version"] = 1
    restored = CostModel.from_flops(FlopModel(1, 1, 1))
    restored.load_state_dict(state)
    assert restored.coefficients() == model.coefficients()


@pytest.mark.parametrize("damage", ["version", "kinds", "rows"])
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    model = CostModel.from_flops(FLOPS)
    model.observe(clean(blocks(np.random.default_rng(6), 20)))
    before = model.coefficients()
    state = json.loads(json.dumps(model.state_dict()))
    if damage == "version":
        state["version"] = 7
    elif damage == "kinds":
        del state["kinds"][FORWARD]
    else:
        state["kinds"][TRAINING]["rows"][0] = [1.0]
    with pytest.raises(ValueError, match="not the state of a cost model"):
        model.load_state_dict(state)
    assert model.coefficients() == before


def test_bad_priors_are_refused():
    c = CostModel.from_flops(FLOPS).coefficients()
    with pytest.raises(ValueError, match="lacks"):
        CostModel({TRAINING: c})
    negative = dataclasses.replace(c, per_pair=-1.0)
    with pytest.raises(ValueError, match="expected all >= 0"):
        CostModel({TRAINING: c, FORWARD: negative})
    with pytest.raises(ValueError, match="window"):
        CostModel({TRAINING: c, FORWARD: c}, window=0)


# a, then two forks of two leaves each
TREE = make_tree("aabbccc", "aabbddd", "aaeefff", "aaeeggg")


@pytest.mark.parametrize("retain_tokens", [None, 0])
@pytest.mark.parametrize("training", [True, False])
def test_a_schedule_costs_the_sum_of_its_blocks(retain_tokens, training):
    schedule = build_schedule(TREE, 5, retain_tokens, training)
    priced = list(schedule_features(TREE, schedule))
    total = BlockFeatures(*np.sum([f.as_tuple() for _, f in priced], axis=0))
    assert total.num_blocks == schedule.num_blocks
    tokens = total.num_grad_tokens + total.num_no_grad_tokens
    assert tokens == schedule.num_forward_tokens
    assert total.num_grad_tokens == schedule.num_backward_tokens
    # the pairs that its FLOPs have, too
    pair_flops = FlopModel(0, 1, 0)
    pairs = sum(f.num_pairs * (3 if kind == TRAINING else 1) for kind, f in priced)
    assert pairs == pair_flops.schedule(schedule)
    assert total.num_loss_tokens == (TREE.num_sequence_tokens if training else 0)
    model = CostModel.from_flops(FLOPS)
    by_block = sum(model.seconds(f, kind) for kind, f in priced)
    assert model.schedule_seconds(TREE, schedule) == pytest.approx(by_block)


def test_pairs_by_hand():
    schedule = build_schedule(make_tree("abc"), 8)
    ((kind, features),) = schedule_features(make_tree("abc"), schedule)
    # the last token predicts nothing, so two tokens are computed: 1 + 2 pairs
    assert kind == TRAINING
    assert features == BlockFeatures(1, 2, 0, 3, 2, 3, 1)
