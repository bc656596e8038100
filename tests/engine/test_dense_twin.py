"""The first batch of the main job, recorded, through the tree engine and its twin."""

from __future__ import annotations

import copy

import pytest
import torch
from areal.api.cli_args import MicroBatchSpec, NormConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_dta.embedded import generate_problems, tiny_model_path
from areal_dta.engine import DensePPOActor, DTAPPOActor
from areal_dta.tasks.math_reward import math_reward_fn
from tests.engine.builders import actor_config, build_engine
from tests.engine.two_rank_updates import actor_update

NUM_PROMPTS, NUM_SAMPLES, NUM_NEW_TOKENS = 16, 8, 48


@torch.no_grad()
def recorded_batch() -> list[dict[str, torch.Tensor]]:
    """Rollouts of the embedded model, one group of samples a prompt, as AReaL has
    them: logprobs and versions of the policy that sampled, token-aligned masks."""
    path = tiny_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(0)
    items = []
    for problem in generate_problems(NUM_PROMPTS, seed=5):
        messages = [{"role": "user", "content": problem["question"]}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        rows = model.generate(
            torch.tensor([prompt] * NUM_SAMPLES),
            do_sample=True,
            top_k=0,
            max_new_tokens=NUM_NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
        )
        answers = rows[:, len(prompt) :]
        ended = (answers == tokenizer.eos_token_id).cumsum(-1)
        is_answer = (ended - (answers == tokenizer.eos_token_id).long()) == 0
        mask = torch.cat([torch.ones(NUM_SAMPLES, len(prompt)), is_answer], -1)
        loss_mask = mask.clone()
        loss_mask[:, : len(prompt)] = 0
        logp = model(rows, attention_mask=mask.long()).logits.log_softmax(-1)
        logprobs = logp[:, :-1].gather(-1, rows[:, 1:, None]).squeeze(-1)
        rewards = [
            math_reward_fn(
                "", tokenizer.decode(a[k]), prompt, a[k].tolist(), problem["answer"]
            )
            for a, k in zip(answers, is_answer, strict=True)
        ]
        items.append(
            {
                "input_ids": rows,
                "attention_mask": mask.bool(),
                "loss_mask": loss_mask,
                "logprobs": torch.nn.functional.pad(logprobs, (1, 0)) * loss_mask,
                "versions": torch.where(loss_mask.bool(), 0, -1),
                "rewards": torch.tensor(rewards, dtype=torch.float32),
            }
        )
    return items


@pytest.mark.usefixtures("world")
def test_losses_and_gradient_norms_of_the_first_step_agree():
    items = recorded_batch()
    group = NormConfig(mean_level="group", std_level="group", group_size=NUM_SAMPLES)
    options = {
        "reward_norm": group,
        "mb_spec": MicroBatchSpec(max_tokens_per_mb=8192),
        "recompute_logprob": True,
    }
    config = actor_config(tiny_model_path(), **options)
    found = {
        cls: actor_update(build_engine(cls, config), copy.deepcopy(items))
        for cls in (DensePPOActor, DTAPPOActor)
    }
    dense, tree = found[DensePPOActor], found[DTAPPOActor]
    advantages = torch.cat([a.flatten() for a in dense["advantages"]])
    scale = float(advantages[advantages != 0].abs().mean())
    assert scale > 0.1  # samples of a prompt differ in reward, or nothing is learned
    key = "ppo_actor/update/actor_loss/avg"
    assert abs(tree["stats"][key] - dense["stats"][key]) <= 1e-5 * scale
    norm = "ppo_actor/update/grad_norm"
    assert dense["stats"][norm] > 0.01
    assert tree["stats"][norm] == pytest.approx(dense["stats"][norm], rel=1e-4)
