"""Generation with the prefix cache gives what it gives without: tokens, logprobs, ends.

Clients behave as AReaL's: an interrupted request is sent again with its tokens so far,
and an agent sends its whole history with each call.
"""

import copy
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

from areal_dta.rollout_server.answers import Answer, GenerationTask
from areal_dta.rollout_server.generation import BatchGenerator
from areal_dta.rollout_server.protocol import FinishReason
from tests.rollout_server.builders import (
    TOLERANCE,
    VOCAB_SIZE,
    check_logprobs,
    make_generator,
    make_task,
    max_difference,
    model_for_generation,
    oracle_logprobs,
)

BUDGETS = {"off": 0, "evicting": 60_000, "ample": 10**8}


@dataclass
class Call:
    """A request of a client, over all of its interruptions."""

    task: GenerationTask
    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None

    def next_task(self) -> GenerationTask:
        return replace(
            self.task,
            prompt=(*self.task.prompt, *self.tokens),
            max_new_tokens=self.task.max_new_tokens - len(self.tokens),
            num_drawn=len(self.tokens),
        )


class Agents:
    """Episodes of several calls; the same ones for the same seed."""

    def __init__(self, seed: int, num_episodes: int = 8) -> None:
        rng = random.Random(seed)
        self.trunk = [rng.randrange(VOCAB_SIZE) for _ in range(150)]
        self.histories = [
            self.trunk[: rng.choice([3, 20, 150])] + [rng.randrange(VOCAB_SIZE)]
            for _ in range(num_episodes)
        ]
        self.seed = seed

    def calls(self, turn: int) -> list[Call]:
        calls = []
        for i, history in enumerate(self.histories):
            rng = random.Random(f"{self.seed}/{i}/{turn}")
            task = make_task(
                history,
                rng.choice([1, 4, 20]),
                temperature=rng.choice([0.0, 1.0]),
                stop_token_ids=frozenset({3, 5}),
                seed=f"{i}/{turn}",
            )
            calls.append(Call(task, [], []))
        return calls

    def observe(self, calls: list[Call], turn: int) -> None:
        """Histories grow by the answers and by what the tools say."""
        for i, call in enumerate(calls):
            rng = random.Random(f"{self.seed}/{i}/{turn}/tool")
            said = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 9, 70]))]
            self.histories[i] = [*self.histories[i], *call.tokens, *said]


def check_memory(generator: BatchGenerator) -> None:
    cache = generator.prefix_cache
    held = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in (
            *(x for node in cache.nodes() for x in node.kv),
            generator._tails.keys,
            generator._tails.values,
        )
    }
    assert sum(held.values()) == generator.num_kv_bytes
    assert cache.num_unused_bytes <= cache.max_unused_bytes
    running = generator.num_kv_bytes - cache.num_unused_bytes
    limit = generator.max_cached_tokens * cache.shape.bytes_per_token
    if len(generator.rows) > 1:
        assert running <= limit


def run_calls(generator: BatchGenerator, calls: list[Call], rng: random.Random) -> None:
    """Answer all calls, with interruptions at random times."""
    waiting = deque((call, Answer(call.next_task())) for call in calls)
    running: dict[int, tuple[Call, Answer]] = {}
    while waiting or running:
        while waiting and rng.random() < 0.8:
            call, answer = waiting[0]
            if not generator.admit([answer]):
                assert running
                break
            running[id(answer)] = waiting.popleft()
        done = []
        if running:
            done = generator.step()
            check_memory(generator)
            if rng.random() < 0.05:
                done += generator.abort_all()
            elif generator.rows and rng.random() < 0.05:  # a client hangs up, and
                done += generator.drop([rng.choice(generator.rows)])  # tries again
        for answer in done:
            call, _ = running.pop(id(answer))
            assert answer.error is None
            call.tokens += answer.tokens
            call.logprobs += answer.logprobs
            call.finish = answer.finish
            if answer.finish is None or answer.finish.type == "abort":
                if call.task.max_new_tokens == len(call.tokens):
                    call.finish = FinishReason("length", call.task.max_new_tokens)
                else:
                    waiting.append((call, Answer(call.next_task())))


def play(
    model: PreTrainedModel, budget: int, seed: int, interrupts: int
) -> Iterator[Call]:
    """All calls of some episodes; the weights change in the middle."""
    generator = make_generator(
        model,
        max_batch_size=6,
        max_cached_tokens=3000,
        max_prefill_tokens=64,
        prefix_cache_bytes=budget,
    )
    agents, rng = Agents(seed), random.Random(interrupts)
    weight = model.get_input_embeddings().weight
    original = weight.clone()
    try:
        for turn in range(4):
            if turn == 2:
                generator.drop_prefixes()
                weight.mul_(1.5)
            calls = agents.calls(turn)
            run_calls(generator, calls, rng)
            check_logprobs(model, calls)
            agents.observe(calls, turn)
            yield from calls
    finally:
        weight.copy_(original)
    assert bool(generator.prefix_cache.num_unused_tokens) == (budget > 0)


@pytest.mark.parametrize(
    ("name", "overrides"), [("qwen3", {}), ("mistral", {"sliding_window": 25})]
)
def test_equal_with_and_without_the_cache(name: str, overrides: dict) -> None:
    """Under pauses, hung-up clients, evictions and new weights, and in pieces."""
    model = model_for_generation(name, **overrides)
    for seed in range(2):
        expected = list(play(model, 0, seed, interrupts=0))
        assert {call.finish.type for call in expected} == {"stop", "length"}
        for interrupts, budget in enumerate(BUDGETS.values(), 1):
            for call, right in zip(
                play(model, budget, seed, interrupts), expected, strict=True
            ):
                assert call.task == right.task
                assert call.tokens == right.tokens
                assert call.finish.type == right.finish.type
                assert max_difference(call.logprobs, right.logprobs) < TOLERANCE


def test_a_history_that_is_sent_again_is_not_computed_again(model) -> None:
    generator = make_generator(model, prefix_cache_bytes=10**8)
    prompt = [i % VOCAB_SIZE for i in range(200)]
    cached = []
    for turn in range(3):
        answer = Answer(make_task(prompt, 10, seed=turn))
        generator.admit([answer])
        while generator.rows:
            generator.step()
        cached.append(answer.num_cached_tokens)
        prompt = [*prompt, *answer.tokens, 1, 2, 3]
    # Of an answer, the last token has not been through the model.
    assert cached == [0, 209, 222]


def test_one_request_at_a_time_is_equal_to_the_last_bit(model) -> None:
    """Whatever was computed before: nothing is kept, however large the budget."""
    shared = [i % VOCAB_SIZE for i in range(100)]
    tasks = [make_task([*shared, i, *shared[:i]], 10, seed=i) for i in range(6)]

    def run(order: list[int]) -> dict[int, list[float]]:
        generator = make_generator(
            model, max_batch_size=1, max_prefill_tokens=30, prefix_cache_bytes=10**8
        )
        found = {}
        for i in order:
            answer = Answer(tasks[i])
            assert generator.admit([answer, Answer(tasks[0])]) == 1
            while generator.rows:
                generator.step()
            assert answer.num_cached_tokens == 0
            found[i] = answer.logprobs
        return found

    assert run([0, 1, 2, 3, 4, 5]) == run([5, 2, 4, 0, 3, 1])


def serve_random_requests(model: PreTrainedModel, num_requests: int) -> None:
    """Memory stays within its bounds: after every step all bytes are counted."""
    rng = random.Random(7)
    generator = make_generator(
        model,
        max_batch_size=16,
        max_cached_tokens=2000,
        max_prefill_tokens=128,
        prefix_cache_bytes=200_000,
    )
    families = [[rng.randrange(VOCAB_SIZE) for _ in range(200)] for _ in range(6)]
    num_left, waiting = num_requests, deque()
    num_cached = num_prompt = 0
    while num_left or waiting or generator.rows:
        while num_left and len(waiting) < 8:
            num_left -= 1
            family = rng.choice(families)
            prompt = family[: rng.randint(1, 200)]
            prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(8))]
            waiting.append(Answer(make_task(prompt, rng.randint(1, 8), seed=num_left)))
        while waiting and generator.admit([waiting[0]]):
            answer = waiting.popleft()
            num_cached += answer.num_cached_tokens
            num_prompt += len(answer.prefix)
        generator.step()
        check_memory(generator)
        if rng.random() < 0.02 and generator.rows:
            generator.drop([rng.choice(generator.rows)])
    assert 0.2 < num_cached / num_prompt < 0.95
    generator.clear()
    assert generator.num_kv_bytes == 0


def test_memory_stays_within_its_bounds(model) -> None:
    serve_random_requests(model, 300)


@pytest.mark.slow
def test_memory_stays_within_its_bounds_for_long(model) -> None:
    serve_random_requests(model, 10_000)


def test_a_failed_step_leaves_the_cache_as_it_was(model, monkeypatch) -> None:
    generator = make_generator(model, prefix_cache_bytes=10**8, max_prefill_tokens=64)
    prompt = [i % VOCAB_SIZE for i in range(150)]
    forward = type(model).forward

    def broken(self, *args, **kwargs):
        forward(self, *args, **kwargs)
        raise RuntimeError("out of memory")

    failed = [Answer(make_task(prompt, 5, seed=i)) for i in range(2)]
    generator.admit(failed)
    generator.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", broken)
        with pytest.raises(RuntimeError) as error:
            generator.step()
    # The other one waits for the same piece, and computes it now.
    assert generator.drop_failed(error.value) == failed[:1]
    check_memory(generator)
    later = Answer(make_task(prompt, 5, seed=2))
    generator.admit([later])
    assert later.num_cached_tokens == len(prompt) - 1
    while generator.rows:
        generator.step()
    check_logprobs(model, [failed[1], later])


def test_half_precision_rounds_as_the_model_alone_does() -> None:
    """Rows that share a prefix are no further from float32 than 1.5 times the model."""
    model = model_for_generation().to(torch.bfloat16)
    in_fp32 = copy.deepcopy(model).float()
    generator = make_generator(model, prefix_cache_bytes=10**8)
    prompt = [i % VOCAB_SIZE for i in range(300)]
    answers = [Answer(make_task([*prompt, i], 24, seed=i)) for i in range(8)]
    generator.admit(answers)
    while generator.rows:
        generator.step()

    ours, alone = [], []
    for answer in answers:
        args = list(answer.task.prompt), answer.tokens, 1.0
        truth = torch.tensor(oracle_logprobs(in_fp32, *args))
        ours.append(torch.tensor(answer.logprobs) - truth)
        alone.append(torch.tensor(oracle_logprobs(model, *args)) - truth)
    assert torch.cat(ours).norm() <= 1.5 * torch.cat(alone).norm()
