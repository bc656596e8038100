"""Two ranks with different trees, one of them empty: never waiting, one result."""

import pytest
import torch
from areal.engine.fsdp_engine import FSDPPPOActor

from tests.engine.builders import (
    actor_config,
    build_engine,
    one_sequence_each,
    relative_error,
    rows_of,
    save_tiny_critic,
    save_tiny_model,
    save_tiny_moe,
)
from tests.engine.checks import grpo_loss, labelled, loss_tokens, train_once
from tests.engine.ranks import run_ranks
from tests.engine.two_rank_data import lm_items, pair_items, trajectories, union
from tests.engine.two_rank_scenarios import LORA, UNEVEN, Scenarios, run_all
from tests.engine.two_rank_updates import (
    actor_options,
    actor_update,
    critic_engine,
    critic_update,
    dpo_update,
    fused_update,
    lm_update,
    rw_update,
    tree_engine,
)

pytestmark = pytest.mark.usefixtures("world")

FP32 = 1e-5


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("two_ranks")
    save_tiny_model(path / "tiny")
    save_tiny_moe(path / "moe")
    save_tiny_critic(path / "critic")
    return path


@pytest.fixture(scope="module")
def ranks(directory):
    """What both ranks saved: a dict a rank, scenario -> results."""
    return run_ranks(run_all, [2], directory)[2]


@pytest.fixture(scope="module")
def one_rank(directory):
    """The tree engine on the union of the rows, alone."""
    return Scenarios(0, directory)._train_eval_forward(
        tree_engine(directory / "tiny"), union()
    )


def assert_same_update(actual, expected):
    assert relative_error(actual["gradients"], expected["gradients"]) <= FP32
    assert relative_error(actual["parameters"], expected["parameters"]) <= FP32
    norms = actual["result"]["grad_norm"], expected["result"]["grad_norm"]
    assert norms[0] == pytest.approx(norms[1], rel=FP32)


SCALARS = ("version_stats/", "rs_filtered_fraction")
SUMS_OVER_TREES = (
    "dta/tree",
    "dta/computed",
    "dta/num",
    "dta/sharing",
    "dta/predicted",
)


def assert_same_statistics(actual, expected, ignore=()):
    """Prefixes shared across ranks are computed by each, hence what is left out."""
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if not key.startswith((*SUMS_OVER_TREES, *ignore)) and "__count" not in key:
            assert actual[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize(
    "scenario",
    [
        "uneven_trees",
        "empty_list_on_rank_1",
        "empty_rows_on_rank_0",
        "uneven_trees_by_the_layer",
        "empty_list_on_rank_1_by_the_layer",
    ],
)
def test_the_union_of_the_rows_decides(ranks, one_rank, scenario):
    for results in ranks:
        actual = results[scenario]
        assert_same_update(actual, one_rank)
        torch.testing.assert_close(actual["eval"], one_rank["eval"])
        for key in ("stats", "eval_stats"):
            # scalars are means over ranks, as AReaL's are
            ignore = SCALARS if scenario.startswith("uneven_trees") else ()
            assert_same_statistics(actual[key], one_rank[key], ignore)


@pytest.mark.parametrize("when", ["forward", "forward_after"])
def test_forward_of_different_rows(ranks, one_rank, when):
    batch = union()
    expected = labelled(one_rank[when], batch)
    for rank, results in enumerate(ranks):
        mine = rows_of(batch, UNEVEN[rank])
        actual = labelled(results["uneven_trees"][when], mine)
        width = actual.shape[1]
        torch.testing.assert_close(actual, expected[UNEVEN[rank], :width])


def test_forward_on_an_empty_rank(ranks, one_rank):
    assert ranks[1]["empty_list_on_rank_1"]["forward"] == []
    assert ranks[0]["empty_rows_on_rank_0"]["forward"].shape == (0, 0)
    for rank, scenario in enumerate(("empty_list_on_rank_1", "empty_rows_on_rank_0")):
        actual = ranks[rank][scenario]["forward"]
        torch.testing.assert_close(actual, one_rank["forward"])


def test_a_rank_without_loss_tokens(ranks, directory):
    batch = union()
    batch["loss_mask"][UNEVEN[1]] = 0
    expected = train_once(tree_engine(directory / "tiny"), batch)
    for results in ranks:
        actual = results["weightless_rows_on_rank_1"]
        assert_same_update(actual, expected)
        assert actual["stats"].keys() == expected["stats"].keys()
        for key in ("n_valid_tokens", "actor_loss/avg", "new_logp/min", "dta/loss"):
            assert actual["stats"][key] == pytest.approx(expected["stats"][key], 1e-4)


def test_a_mixture_reduces_the_same_parameters_on_both_ranks(ranks, directory):
    engine = tree_engine(directory / "moe", router_load=True, router_aux_loss=0.1)
    expected = train_once(engine, union())
    aux_loss = expected["stats"]["dta/router_aux_loss"]
    assert 2 <= aux_loss < 8  # the number of experts per token, if they were even
    load = {
        k: v
        for k, v in expected["stats"].items()
        if "expert_load" in k and not k.endswith("__count")  # AReaL's, of scalars
    }
    assert load.keys() == {
        "dta/expert_load_max_over_mean",
        "dta/expert_load_max_over_mean/layer_0",
        "dta/expert_load_max_over_mean/layer_1",
    }
    assert all(1.0 < ratio <= 8.0 for ratio in load.values())
    for results in ranks:
        actual = results["mixture_with_rank_1_empty"]
        assert_same_update(actual, expected)
        for key, ratio in {**load, "dta/router_aux_loss": aux_loss}.items():
            assert actual["stats"][key] == pytest.approx(ratio), key


@pytest.mark.parametrize(
    "scenario", ["adapters_with_rank_1_empty", "adapters_by_the_layer"]
)
def test_adapters_on_two_ranks(ranks, directory, scenario):
    torch.manual_seed(0)  # adapters are drawn by rank 0 and broadcast
    expected = train_once(tree_engine(directory / "tiny", **LORA), union())
    assert all("lora_" in name for name in expected["gradients"])
    for results in ranks:
        assert_same_update(results[scenario], expected)


def test_parameters_that_one_token_does_not_reach(ranks):
    """Two backwards on rank 0 alone, averaged over both ranks."""
    for results in ranks:
        grads = results["experts_that_one_token_does_not_reach"]
        assert len(grads) == 9
        for name, grad in grads.items():
            if name == "experts.3.bias":
                assert grad.tolist() == [1, 1]
            elif name not in ("embed.weight", "experts.3.weight"):
                assert not grad.any(), name


def test_two_ranks_of_areal(ranks):
    for results in ranks:
        assert_same_update(
            results["tree_engine_on_the_same_rows"], results["stock_engine"]
        )
        # the loss of the batch is the mean over its loss tokens
        loss = results["stock_engine"]["stats"]["actor_loss/avg"]
        stats = results["tree_engine_on_the_same_rows"]["stats"]
        assert stats["actor_loss/avg"] == pytest.approx(loss, rel=1e-5)


def test_a_failing_rank_tells_the_other(ranks, one_rank):
    errors = [results["rank_1_fails_in_its_loss"]["error"] for results in ranks]
    assert errors[0].startswith("PeerFailure: 1 of 2 ranks failed")
    assert errors[1] == "ArithmeticError: no loss today"
    for results in ranks:  # and both go on as if nothing had been
        assert_same_update(results["rank_1_fails_in_its_loss"], one_rank)


def test_a_rank_out_of_memory_runs_again_alone(ranks, one_rank):
    actual = [results["rank_1_runs_out_of_memory"] for results in ranks]
    assert [results["retain_tokens"] for results in actual] == [6, 0]
    for results in actual:
        assert_same_update(results, one_rank)
        assert_same_statistics(results["stats"], one_rank["stats"], SCALARS)


def test_bad_rows_on_one_rank(ranks, one_rank):
    errors = [results["rank_1_has_bad_rows"]["error"] for results in ranks]
    assert errors[0].startswith("PeerFailure: ranks [1] could not load")
    assert errors[1].startswith("ValueError: rows [0] of attention_mask")
    for results in ranks:
        assert_same_update(results["rank_1_has_bad_rows"], one_rank)


@pytest.mark.parametrize(
    "scenario, num_minibatches",
    [("actor_with_rank_1_empty", 2), ("actor_with_uneven_items", 1)],
)
def test_a_whole_actor_step(ranks, directory, scenario, num_minibatches):
    engine = tree_engine(directory / "tiny", **actor_options(num_minibatches))
    expected = actor_update(engine, trajectories())
    both = [results[scenario] for results in ranks]
    for key in ("logp", "advantages"):
        values = [*both[0][key], *both[1][key]]
        assert len(values) == len(expected[key])
        for actual, value in zip(values, expected[key], strict=True):
            torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-5)
    for actual in both:
        assert relative_error(actual["parameters"], expected["parameters"]) <= FP32
        ignore = (
            "ppo_actor/no_eos_ratios",  # depend on the padded width, in AReaL too
            "ppo_actor/n_tokens",
            "ppo_actor/update/num_micro_batches",
            *(f"ppo_actor/update/{name}" for name in SCALARS),
        )
        assert_same_statistics(actual["stats"], expected["stats"], ignore)


@pytest.fixture(scope="module")
def algorithms_alone(directory):
    """Each algorithm's update on all items, on one rank."""
    tiny, critic = directory / "tiny", directory / "critic"
    return {
        "critic": critic_update(critic_engine(critic), trajectories()),
        "lm": lm_update(tiny, lm_items()),
        "dpo": dpo_update(tiny, pair_items()),
        "rw": rw_update(critic, pair_items(False)),
        "fused": fused_update(tiny, trajectories()),
    }


@pytest.mark.parametrize(
    "scenario",
    [
        "critic_with_uneven_items",
        "critic_with_rank_1_empty",
        "lm_with_uneven_items",
        "lm_with_rank_0_empty",
        "dpo_with_uneven_items",
        "dpo_with_rank_1_empty",
        "rw_with_uneven_items",
        "rw_with_rank_1_empty",
        "fused_with_rank_1_empty",
    ],
)
def test_every_algorithm_on_two_ranks(ranks, algorithms_alone, scenario):
    expected = algorithms_alone[scenario.partition("_")[0]]
    for results in ranks:
        actual = results[scenario]
        assert relative_error(actual["parameters"], expected["parameters"]) <= FP32
        keys = "ppo_actor/no_eos_ratios", "ppo_actor/n_tokens"
        ignore = keys if "empty" in scenario else (*keys, "sft/n_tokens")
        assert_same_statistics(actual["stats"], expected["stats"], ignore)
    if scenario.startswith("critic"):
        values = [v for results in ranks for v in results[scenario]["values"]]
        for actual, value in zip(values, expected["values"], strict=True):
            torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight_format", ["hf", "dcp"])
def test_a_checkpoint_of_two_ranks_loads_in_areal(ranks, directory, weight_format):
    from areal.api import SaveLoadMeta

    from tests.engine.builders import parameters

    engine = build_engine(
        FSDPPPOActor,
        actor_config(directory / "tiny", mb_spec=one_sequence_each(len(UNEVEN[0]))),
    )
    meta = SaveLoadMeta(
        str(directory / weight_format), weight_format, False, None, None
    )
    engine.load(meta)
    expected = ranks[0]["checkpoint"]["parameters"]
    assert relative_error(parameters(engine), expected) == 0
    assert engine.eval_batch(union(), grpo_loss(), loss_tokens).isfinite()
