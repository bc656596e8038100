"""Models with states generate what a whole forward over each sequence gives."""

import numpy as np
import pytest
import torch

from areal_dta.executor.model_refusals import UnsupportedModelError
from areal_dta.rollout_server.answers import Answer
from areal_dta.rollout_server.states import state_layers
from tests.models import VOCAB_SIZE, tiny_model
from tests.rollout_server.builders import (
    WITH_STATES,
    check_logprobs,
    make_generator,
    make_task,
    model_for_generation,
    run_all,
)

LIMITS = [{}, {"max_prefill_tokens": 7}, {"max_batch_size": 1}]


@pytest.fixture(params=sorted(WITH_STATES), scope="module")
def model(request):
    return model_for_generation(request.param, **WITH_STATES[request.param])


def tasks(seed=0):
    """Prompts from one token to more than is copied, some of them several times."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in (1, 2, 5, 40, 150)]
    prompts += [prompts[3], prompts[3], prompts[1], prompts[3][:20]]
    return [
        make_task(p, int(rng.integers(2, 9)), temperature=t)
        for p in prompts
        for t in (0.0, 1.0)
    ]


def run_in_turns(generator, answers, per_step=2):
    """Let requests join and leave between steps."""
    waiting = list(answers)
    while waiting or generator.rows:
        admitted = generator.admit(waiting[:per_step])
        waiting = waiting[admitted:]
        generator.step()


def check_greedy(model, answer):
    """Each token is the best one of a whole forward, without a cache."""
    sequence = [*answer.task.prompt, *answer.tokens]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
    first = len(answer.task.prompt) - 1
    assert logits[first:-1].argmax(-1).tolist() == answer.tokens


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_tokens_and_logprobs_are_those_of_whole_forwards(model, limits):
    generator = make_generator(model, **limits, prefix_cache_bytes=2**20)
    answers = [Answer(task) for task in tasks()]
    run_in_turns(generator, answers)
    check_logprobs(model, answers)
    for answer in answers:
        if answer.task.sampling.temperature == 0:
            check_greedy(model, answer)
    cache = generator.prefix_cache
    assert cache.num_used_tokens == cache.num_unused_tokens == 0


def test_equal_prompts_share_one_prefill(model):
    generator = make_generator(model)
    prompt = list(range(3, 33))
    answers = run_all(generator, [make_task(prompt, 3, seed=str(i)) for i in range(3)])
    assert [answer.num_cached_tokens for answer in answers] == [0, 29, 29]
    check_logprobs(model, answers)


def test_interrupted_requests_go_on_after_new_weights(model):
    generator = make_generator(model)
    answers = [Answer(task) for task in tasks(1)]
    generator.admit(answers)
    for _ in range(2):
        generator.step()
    aborted = generator.abort_all()
    generator.drop_prefixes()
    before = [p.clone() for p in model.parameters()]
    try:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
        # as AReaL's client sends them: the tokens so far become part of the prompt
        again = [
            make_task([*answer.task.prompt, *answer.tokens], 4) for answer in aborted
        ]
        check_logprobs(model, run_all(generator, again))
    finally:
        for p, old in zip(model.parameters(), before, strict=True):
            p.data.copy_(old)


def test_a_failed_step_leaves_the_states_of_the_others(model, monkeypatch):
    generator = make_generator(model)
    first, second = [Answer(task) for task in tasks(2)[6:8]]
    generator.admit([first])
    generator.step()
    generator.admit([second])
    forward = type(model).forward

    def fail(self, *args, **kwargs):
        forward(self, *args, **kwargs)
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            generator.step()
    assert generator.drop_failed(RuntimeError("out of luck")) == [second]
    while generator.rows:
        generator.step()
    check_logprobs(model, [first])


def test_the_layers_get_their_own_functions_back(model):
    before = [dict(vars(m)) for m in model.modules()]
    run_all(make_generator(model), tasks()[:2])
    assert [dict(vars(m)) for m in model.modules()] == before


def test_other_states_are_refused_by_name():
    model = tiny_model(
        "mamba2",
        num_heads=4,
        head_dim=16,
        n_groups=1,
        attn_implementation="eager",
    )
    with pytest.raises(UnsupportedModelError, match="conv1d|Mamba2Mixer.*cannot keep"):
        state_layers(model)
    assert state_layers(tiny_model("qwen3")) == []
