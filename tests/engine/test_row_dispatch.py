"""Sequences dealt to 1, 2 and 3 ranks give what one rank gives on whole items."""

import pytest
import torch
from areal.api.cli_args import NormConfig, TrainEngineConfig
from areal.engine.fsdp_engine import FSDPPPOActor
from areal.trainer.sft.lm_engine import LMController

from areal_dta.collector.controllers import (
    DTAActorController,
    DTACriticController,
    controller_of,
)
from areal_dta.engine import DensePPOActor, DensePPOCritic, DTALMEngine, DTAPPOActor
from tests.engine.builders import (
    actor_config,
    build_engine,
    engine_config,
    one_sequence_each,
    parameters,
    relative_error,
    save_tiny_critic,
    save_tiny_model,
)
from tests.engine.dispatch_scenarios import (
    BATCHES,
    NORMS,
    SpmdActor,
    actor_step,
    critic,
    critic_step,
    dense_actor,
    make_items,
    run_all,
    tree_actor,
)
from tests.engine.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("world")

FP32 = 1e-5
# Means over ranks of what a loss call logs, and how many; micro-batches are each
# engine's own.
NOT_COMPARED = (
    "version_stats/",
    "__count",
    "num_micro_batches",
    "vocab_",
    "dta/",
    "timeperf/",
)
# Placeholder rows of a dense rank with fewer rows than micro-batches count as tokens.
DENSE_COUNTS = ("update/n_tokens", "ppo_critic/n_tokens")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("dispatch")
    save_tiny_model(path / "tiny")
    save_tiny_critic(path / "critic")
    return path


@pytest.fixture(scope="module")
def ranks(directory):
    """World size -> what each of its ranks saved."""
    return run_ranks(run_all, [3, 2], directory)


@pytest.fixture(scope="module")
def dense(directory):
    """The dense engine on one rank, called as AReaL calls it."""
    results = {}
    for name, sizes in BATCHES.items():
        engine = dense_actor(directory / "tiny")
        results[name] = actor_step(engine, make_items(sizes), engine)
    return results


def assert_same_statistics(actual, expected, ignore=()):
    def compared(stats):
        return {
            key: value
            for key, value in stats.items()
            if not any(part in key for part in (*NOT_COMPARED, *ignore))
        }

    actual, expected = compared(actual), compared(expected)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key


def assert_same_step(actual, expected, ignore=()):
    assert relative_error(actual["parameters"], expected["parameters"]) <= FP32
    for key in ("advantages", "returns", "values"):
        for a, e in zip(actual.get(key, ()), expected.get(key, ()), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    assert_same_statistics(actual["stats"], expected["stats"], ignore)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_trees_dealt_by_sequence_equal_one_dense_rank(
    directory, dense, request, num_ranks, batch
):
    if num_ranks == 1:
        actor = SpmdActor(tree_actor(directory / "tiny"))
        everyone = [actor_step(actor, make_items(BATCHES[batch]))]
    else:
        ranks = request.getfixturevalue("ranks")[num_ranks]
        everyone = [results[f"tree/{batch}"] for results in ranks]
    for actual in everyone:
        assert_same_step(actual, dense[batch])


def test_equal_groups_equal_stock_areal(directory, dense):
    sizes = BATCHES["equal"]
    spec = one_sequence_each(sum(sizes))  # so that nothing can leak
    config = actor_config(directory / "tiny", mb_spec=spec, **NORMS)
    stock = build_engine(FSDPPPOActor, config)
    expected = actor_step(stock, make_items(sizes), stock)
    assert_same_step(dense["equal"], expected)
    before = parameters(build_engine(FSDPPPOActor, config))
    assert relative_error(expected["parameters"], before) > 1e-4  # it was trained


@pytest.mark.parametrize("batch", ["unequal", "one_row"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_dense_twin_takes_any_number_of_rows(ranks, dense, num_ranks, batch):
    for results in ranks[num_ranks]:
        assert_same_step(results[f"dense/{batch}"], dense[batch], DENSE_COUNTS)


@pytest.mark.parametrize("kind", ["tree", "dense"])
@pytest.mark.parametrize("batch", ["unequal", "one_row"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_critics(directory, ranks, num_ranks, batch, kind):
    engine = critic(DensePPOCritic, directory / "critic")
    expected = critic_step(engine, make_items(BATCHES[batch]), engine)
    for results in ranks[num_ranks]:
        actual = results[f"{kind}_critic/{batch}"]
        masks = [item["loss_mask"] for item in make_items(BATCHES[batch])]
        for a, e, mask in zip(
            actual.pop("values"), expected["values"], masks, strict=True
        ):
            read = mask.roll(-1, -1).bool()  # the tree engine computes no others
            torch.testing.assert_close(a[read], e[read], rtol=1e-4, atol=1e-5)
        assert relative_error(actual["parameters"], expected["parameters"]) <= FP32
        assert_same_statistics(actual["stats"], expected["stats"], DENSE_COUNTS)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_minibatches_are_the_same_on_any_number_of_ranks(directory, ranks, num_ranks):
    actor = SpmdActor(tree_actor(directory / "tiny", ppo_n_minibatches=2))
    expected = actor_step(actor, make_items(BATCHES["unequal"]))
    one = SpmdActor(tree_actor(directory / "tiny"))
    whole = actor_step(one, make_items(BATCHES["unequal"]))
    assert relative_error(expected["parameters"], whole["parameters"]) > 1e-4
    for results in ranks[num_ranks]:
        assert_same_step(results["minibatches"], expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_order_of_arrival_does_not_matter(ranks, num_ranks):
    for results in ranks[num_ranks]:
        expected = results["tree/unequal"]
        for seed in range(3):
            actual = results[f"order/{seed}"]
            assert relative_error(actual["parameters"], expected["parameters"]) <= FP32
            assert_same_statistics(actual["stats"], expected["stats"])


def test_blocks_are_reported_once(directory):
    actor = SpmdActor(tree_actor(directory / "tiny"))
    actor_step(actor, make_items(BATCHES["unequal"]))
    samples = actor.engine.take_block_samples()
    assert all(len(row) == 9 and row[-2] > 0 for row in samples)  # seconds
    assert actor.engine.take_block_samples() == []


NORM = NormConfig(mean_level="group", std_level="group", group_size=2)


def test_items_of_other_sizes_are_normalised_over_their_own_rows(directory):
    config = actor_config(directory / "tiny", reward_norm=NORM)
    engine = DTAPPOActor(config)
    items = make_items((3, 1, 4))
    rewards = [torch.tensor(r) for r in ([1.0, 0, 0], [1.0], [0.0, 0, 0, 1])]
    for item, reward in zip(items, rewards, strict=True):
        item["rewards"] = reward
    done = engine.compute_advantages(items)
    for item, reward in zip(done, rewards, strict=True):
        centred = reward - reward.mean()
        spread = reward.std(unbiased=True) if len(reward) > 1 else torch.tensor(1.0)
        expected = centred / (spread + NORM.eps)
        for row, value in zip(item["tot_rewards"], expected, strict=True):
            assert row.sum() == pytest.approx(float(value), abs=1e-5)


def test_a_trajectory_of_several_sequences_counts_its_reward_once(directory):
    config = actor_config(directory / "tiny", reward_norm=NORM)
    item, other = make_items((5, 2))
    item["rewards"] = torch.tensor([1.0, 1, 1, 0, 0.5])
    item["begin_of_trajectory"] = torch.tensor([1, 0, 0, 1, 1])
    other["rewards"] = torch.tensor([1.0, 0.0])
    other["begin_of_trajectory"] = torch.tensor([1, 1])
    done, _ = DTAPPOActor(config).compute_advantages([item, other])
    trajectories = torch.tensor([1.0, 0, 0.5])
    expected = (trajectories - trajectories.mean()) / (trajectories.std() + NORM.eps)
    got = done["tot_rewards"].sum(-1)
    torch.testing.assert_close(got, expected[[0, 0, 0, 1, 2]], rtol=1e-4, atol=1e-5)


def test_one_controller_for_every_engine(directory):
    for engine in (DTAPPOActor, DensePPOActor):
        controller = controller_of(engine, actor_config(directory / "tiny"), None)
        assert type(controller) is DTAActorController
        assert controller.train_engine is engine
    config = critic(DensePPOCritic, directory / "critic").config
    assert type(controller_of(DensePPOCritic, config, None)) is DTACriticController
    lm = engine_config(TrainEngineConfig, directory / "tiny")
    assert type(controller_of(DTALMEngine, lm, None)) is LMController
