"""The self-check in the engine: once, before the first step; a fault stops the run."""

import pytest
import torch

from areal_dta.config.engine_options import DTAOptions
from areal_dta.config.schema import DTAPPOActorConfig
from areal_dta.engine import DTAPPOActor, oom_retry
from areal_dta.executor import UnsupportedModelError
from areal_dta.executor import attention as attention_module
from tests.engine.builders import (
    actor_config,
    build_engine,
    grpo_batch,
    save_tiny_critic,
    save_tiny_model,
    save_tiny_moe,
)
from tests.engine.checks import train_once
from tests.engine.ranks import run_ranks
from tests.engine.self_check_scenarios import MODELS, RESHARD, run_all

pytestmark = pytest.mark.usefixtures("world")


def engine(model, **options):
    config = actor_config(model)
    dta = DTAOptions(block_tokens=4, **options)
    return build_engine(DTAPPOActor, DTAPPOActorConfig(**vars(config), dta=dta))


@pytest.mark.parametrize("reshard", ["step", "block"])
def test_it_runs_once_and_changes_nothing(tiny_model, monkeypatch, reshard):
    calls = []
    original = oom_retry.check_on_tiny_tree
    monkeypatch.setattr(
        oom_retry, "check_on_tiny_tree", lambda e: (calls.append(e), original(e))
    )
    batch = grpo_batch()
    checked, unchecked = (
        engine(tiny_model, reshard=reshard, self_check=on) for on in (True, False)
    )
    results = [[train_once(e, batch) for _ in range(2)] for e in (checked, unchecked)]
    assert calls == [checked.runner.executor]
    for got, want in zip(*results, strict=True):
        assert got["parameters"].keys() == want["parameters"].keys()
        for name, value in want["parameters"].items():
            assert torch.equal(got["parameters"][name], value), name


def test_a_fault_stops_the_first_step(tiny_model, monkeypatch):
    original = attention_module.attend

    def attend(block, layer_idx, asked, query, *args):
        return original(block, layer_idx, asked, query * (1 + 0.1 * layer_idx), *args)

    monkeypatch.setattr(attention_module, "attend", attend)
    actor = engine(tiny_model, self_check=True)
    for _ in range(2):  # and every later attempt
        with pytest.raises(UnsupportedModelError, match="hidden states of layer 1 "):
            train_once(actor, grpo_batch())
    train_once(engine(tiny_model, self_check=False), grpo_batch())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("self_check")
    save_tiny_model(path / "tiny")
    save_tiny_moe(path / "moe")
    save_tiny_critic(path / "critic")
    return run_ranks(run_all, [2], path)[2]


@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_as_without_it(ranks, model, reshard):
    for results in ranks:
        checked, unchecked = results[f"{model}-{reshard}"]
        assert checked["calls"] == 1 and unchecked["calls"] == 0
        assert checked["rng_kept"]
        got, want = checked["found"], unchecked["found"]
        assert got.keys() == want.keys() and any("exp_avg" in n for n in want)
        for name, value in want.items():
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize("reshard", RESHARD)
def test_a_fault_on_one_rank_stops_both(ranks, reshard):
    for results in ranks:
        result = results[f"fault-{reshard}"]
        assert "hidden states of layer 1 " in result["error"]
        assert result["kept"] and result["result"]["update_successful"]
    assert ranks[0][f"fault-{reshard}"]["error"].startswith("rank 1: Qwen3ForCausalLM")


def test_another_error_on_one_rank_stops_both(ranks):
    assert ranks[0]["crash"] == (
        "UnsupportedModelError: rank 1: ArithmeticError: no check today"
    )
    assert ranks[1]["crash"] == "ArithmeticError: no check today"
