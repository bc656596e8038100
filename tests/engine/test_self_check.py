"""The self-check in the engine: once, before the first step; a fault stops the run."""

import pytest
import torch

from areal_dta.config.engine_options import DTAOptions
from areal_dta.config.schema import DTAPPOActorConfig
from areal_dta.engine import DTAPPOActor, oom_retry
from areal_dta.executor import UnsupportedModelError
from areal_dta.executor import attention as attention_module
from tests.engine.builders import actor_config, build_engine, grpo_batch
from tests.engine.checks import train_once

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
