"""What the trainer adds for agents: a key of its own, and a check of the logprobs."""

import torch
from areal.api.cli_args import AgentConfig

from areal_dta.areal_fixes.trainer_steps import with_secret_key
from areal_dta.config.resolved import resolve
from areal_dta.config.schema import to_structured
from areal_dta.report.logprob_gap import logprob_gap
from areal_dta.startup.compose import compose, find_config


def test_the_proxy_gets_a_key_that_nobody_knows():
    name = find_config("gsm8k_calculator.yaml")
    run = resolve(to_structured(compose(name, ["hardware=cpu"])))
    config = run.config
    first, second = (with_secret_key(run).config.rollout.agent for _ in range(2))
    keys = {first.admin_api_key, second.admin_api_key, AgentConfig.admin_api_key}
    assert len(keys) == 3
    assert config.rollout.agent.admin_api_key == AgentConfig.admin_api_key
    config.rollout.agent.admin_api_key = "mine"
    assert with_secret_key(run).config.rollout.agent.admin_api_key == "mine"


def item(logprobs, versions, loss_mask):
    return {
        "attention_mask": torch.ones(1, len(logprobs), dtype=torch.bool),
        "logprobs": torch.tensor([logprobs]),
        "versions": torch.tensor([versions]),
        "loss_mask": torch.tensor([loss_mask]),
    }


def test_only_trained_tokens_of_the_trainers_version_are_compared():
    batch = [item([0.0, -9.0, -1.0, -2.0], [-1, 2, 3, 3], [0, 1, 1, 1])]
    # the trainer's are aligned with the token before
    recomputed = [torch.tensor([[-1.0, -1.5, -2.25, 7.0]])]
    gap = logprob_gap(batch, recomputed, version=3)
    assert gap == {"logprob_gap/num_tokens": 2.0, "logprob_gap/max": 0.5}
    gap = logprob_gap(batch, recomputed, version=2)
    assert gap == {"logprob_gap/num_tokens": 1.0, "logprob_gap/max": 8.0}
    gap = logprob_gap(batch, recomputed, version=4)
    assert gap == {"logprob_gap/num_tokens": 0.0, "logprob_gap/max": 0.0}
