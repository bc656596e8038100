import random

import pytest
import torch

from areal_dta.rollout_server.answers import (
    ABORTED_BEFORE_PREFILL,
    Answer,
    GenerationTask,
)
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
    run_all,
)


def random_prompt(rng: random.Random, longest: int = 20) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_batched_logprobs_equal_a_full_forward(model, temperature: float) -> None:
    rng = random.Random(3)
    tasks = [
        make_task(
            random_prompt(rng), rng.randint(1, 30), temperature=temperature, seed=i
        )
        for i in range(24)
    ]
    answers = run_all(make_generator(model), tasks)
    for answer in answers:
        assert len(answer.tokens) == answer.task.max_new_tokens
        assert answer.finish == FinishReason("length", answer.task.max_new_tokens)
    check_logprobs(model, answers)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3-tied", {}),
        ("qwen3_moe", {}),
        ("mistral", {"sliding_window": 6}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    ],
)
def test_architectures(name: str, overrides: dict) -> None:
    model = model_for_generation(name, **overrides)
    rng = random.Random(5)
    tasks = [make_task(random_prompt(rng), rng.randint(5, 25)) for _ in range(6)]
    check_logprobs(model, run_all(make_generator(model), tasks))


@pytest.mark.parametrize("seed", range(4))
def test_requests_join_and_leave_at_any_step(model, seed: int) -> None:
    """Also grows, trims and shifts the cache: answers are longer than its first size,
    and long prompts join after short ones."""
    rng = random.Random(seed)
    generator = make_generator(model, max_prefill_tokens=60)
    finished: list[Answer] = []
    aborted: list[Answer] = []
    waiting = [
        Answer(
            make_task(
                random_prompt(rng, longest=rng.choice([1, 5, 90])),
                rng.choice([1, 7, 40, 150]),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([-1, 10]),
                seed=i,
            )
        )
        for i in range(40)
    ]
    everyone = list(waiting)
    while waiting or generator.rows:
        if waiting and (rng.random() < 0.2 or not generator.rows):
            count = min(len(waiting), rng.randint(1, 6))
            generator.admit(waiting[:count])
            del waiting[:count]
        if rng.random() < 0.02:
            aborted += generator.abort_all()
            continue
        finished += generator.step()
        if generator.rows and rng.random() < 0.05:
            gone = rng.choice(generator.rows)
            generator.drop([gone])
            aborted.append(gone)
    assert sorted(map(id, finished + aborted)) == sorted(map(id, everyone))
    assert all(len(a.tokens) == a.task.max_new_tokens for a in finished)
    check_logprobs(model, everyone)


def test_greedy_equals_unbatched_greedy(model) -> None:
    rng = random.Random(11)
    prompts = [random_prompt(rng) for _ in range(8)]
    answers = run_all(
        make_generator(model), [make_task(p, 20, temperature=0.0) for p in prompts]
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        sequence = list(prompt)
        for _ in range(20):
            with torch.no_grad():
                logits = model(torch.tensor([sequence]), use_cache=False).logits
            sequence.append(int(logits[0, -1].argmax()))
        assert answer.tokens == sequence[len(prompt) :]


def spy_on_forwards(model, monkeypatch) -> list[int]:
    """Record the tokens of each forward from now on."""
    sizes: list[int] = []
    forward = type(model).forward

    def spy(self, *args, **kwargs):
        sizes.append(kwargs["input_ids"].numel())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", spy)
    return sizes


def test_equal_prompts_are_prefilled_once(model, monkeypatch) -> None:
    generator = make_generator(model)
    sizes = spy_on_forwards(model, monkeypatch)
    answers = run_all(generator, [make_task([1, 2, 3, 4], 2, seed=i) for i in range(8)])
    assert sizes == [8 + 3, 8]
    assert len({tuple(answer.tokens) for answer in answers}) > 1


def test_prompts_are_prefilled_in_pieces_while_others_go_on(model, monkeypatch) -> None:
    generator = make_generator(model, max_prefill_tokens=10)
    short, long = [Answer(make_task([n] * n, 8)) for n in (4, 31)]
    generator.admit([short])
    generator.step()
    sizes = spy_on_forwards(model, monkeypatch)
    generator.admit([long])
    for _ in range(4):
        generator.step()
    # The prompt's last tokens come with its first answer.
    assert sizes == [1 + 10, 1 + 10, 2 + 10, 2]
    assert (len(short.tokens), len(long.tokens)) == (5, 2)
    while generator.rows:
        generator.step()
    check_logprobs(model, [short, long])


def test_same_seed_same_answer_whatever_the_batch(model) -> None:
    task = make_task([4, 8, 15], 20, seed="fixed")
    others = [make_task([16, 23], 9, seed=f"other/{i}") for i in range(5)]
    alone = run_all(make_generator(model), [task])[0]
    together = run_all(make_generator(model), [*others, task])[-1]
    assert alone.tokens == together.tokens


def first_answer(model, task: GenerationTask, **kwargs) -> Answer:
    return run_all(make_generator(model, **kwargs), [task])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_neighbours_change_nothing(name: str, temperature: float) -> None:
    model = model_for_generation(name)
    task = make_task([4, 8, 15], 20, temperature=temperature, seed="fixed")
    (alone,) = run_all(make_generator(model), [task])
    long = make_task([i % VOCAB_SIZE for i in range(300)], 30)
    short = make_task([7], 3)
    for neighbours in ([long], [short], [long, short, short, long]):
        answer = run_all(make_generator(model), [*neighbours, task])[-1]
        assert answer.tokens == alone.tokens
        assert max_difference(answer.logprobs, alone.logprobs) < TOLERANCE


def test_an_answer_in_parts_draws_the_same_tokens(model) -> None:
    (whole,) = run_all(make_generator(model), [make_task([4, 8], 20, seed="key")])
    (first,) = run_all(make_generator(model), [make_task([4, 8], 7, seed="key")])
    prompt = [4, 8, *first.tokens]
    (rest,) = run_all(
        make_generator(model), [make_task(prompt, 13, seed="key", num_drawn=7)]
    )
    assert first.tokens + rest.tokens == whole.tokens


def test_one_at_a_time_is_equal_to_the_last_bit(model) -> None:
    """What `max_batch_size=1` is for: no arrival order changes a logprob."""
    rng = random.Random(0)
    tasks = [make_task(random_prompt(rng), 10, seed=i) for i in range(6)]

    def run(order: list[int]) -> dict[int, tuple[list[int], list[float]]]:
        generator = make_generator(model, max_batch_size=1)
        answers = {i: run_all(generator, [tasks[i]])[0] for i in order}
        return {i: (a.tokens, a.logprobs) for i, a in answers.items()}

    assert run([0, 1, 2, 3, 4, 5]) == run([5, 2, 4, 0, 3, 1])


def test_stop_token_ends_the_answer_and_stays_in_it(model) -> None:
    free = first_answer(model, make_task([4, 8, 15], 30))
    stop = free.tokens[10]
    first = free.tokens.index(stop)
    answer = first_answer(model, make_task([4, 8, 15], 30, stop_token_ids={stop}))
    assert answer.tokens == free.tokens[: first + 1]
    assert answer.finish == FinishReason("stop", stop)


def test_min_new_tokens_keeps_stop_tokens_from_being_drawn(model) -> None:
    stops = frozenset(range(0, VOCAB_SIZE, 2))
    answers = run_all(
        make_generator(model),
        [
            make_task([3, 1], 30, min_new_tokens=6, stop_token_ids=stops, seed=i)
            for i in range(20)
        ],
    )
    for answer in answers:
        assert len(answer.tokens) > 6
        assert not stops & set(answer.tokens[:-1])
    check_logprobs(model, answers)


def test_everything_banned_fails_that_request_only(model) -> None:
    bad, good = run_all(
        make_generator(model),
        [
            make_task(
                [3], 5, min_new_tokens=2, stop_token_ids=frozenset(range(VOCAB_SIZE))
            ),
            make_task([3], 5),
        ],
    )
    assert bad.error is not None and "min_new_tokens" in bad.error
    assert good.error is None and len(good.tokens) == 5


class LetterDecoder:
    """Token i is the i-th letter, and 0 is the two bytes of an umlaut."""

    def decode(self, token_ids, **kwargs) -> str:
        return "".join("ä" if t == 0 else chr(ord("a") + t) for t in token_ids)


def test_stop_strings_across_tokens(model) -> None:
    free = first_answer(model, make_task([4, 8, 15], 60))
    text = LetterDecoder().decode(free.tokens)
    stop = text[20:23]
    end = text.index(stop) + len(stop)
    answer = first_answer(
        model,
        make_task([4, 8, 15], 60, stop_strings=("!!", stop)),
        load_decoder=LetterDecoder,
    )
    assert answer.tokens == free.tokens[:end]
    assert answer.finish == FinishReason("stop", stop)


def test_abort_keeps_partial_answers(model) -> None:
    generator = make_generator(model)
    answers = [Answer(make_task([1, 2, 3], 50, seed=i)) for i in range(3)]
    generator.admit(answers)
    early = generator.abort_all()
    assert [a.finish for a in early] == [
        FinishReason("abort", ABORTED_BEFORE_PREFILL)
    ] * 3

    answers = [Answer(make_task([1, 2, 3], 50, seed=i)) for i in range(3)]
    generator.admit(answers)
    for _ in range(7):
        generator.step()
    assert {id(a) for a in generator.abort_all()} == {id(a) for a in answers}
    assert not generator.rows
    for answer in answers:
        assert len(answer.tokens) == 7
        assert answer.finish is not None and answer.finish.type == "abort"
        assert not str(answer.finish.detail).startswith(ABORTED_BEFORE_PREFILL)
    check_logprobs(model, answers)


def test_prompt_logprobs(model) -> None:
    prompt = [4, 8, 15, 16, 23]
    for start in (0, 2, 4, 5):
        task = make_task(prompt, 1, temperature=0.0, prompt_logprobs_from=start)
        answer = first_answer(model, task)
        expected = oracle_logprobs(model, prompt[: start + 1], prompt[start + 1 :], 1.0)
        assert max_difference(answer.prompt_logprobs, expected) < TOLERANCE


def test_admission_respects_rows_and_cache(model) -> None:
    def num_admitted(first: list[Answer]) -> int:
        generator = make_generator(model, max_batch_size=4, max_cached_tokens=100)
        count = generator.admit(first)
        assert list(generator.rows) == first[:count]
        return count

    short = [Answer(make_task([1, 2], 8, seed=i)) for i in range(9)]
    assert num_admitted(short) == 4
    # Their prompts take 19 + 1 tokens; 3 rows x 39 columns would be too many.
    assert num_admitted([Answer(make_task([1] * 20, 20)), *short]) == 2
    # Alone it must fit.
    assert num_admitted([Answer(make_task([1] * 20, 500)), *short]) == 1


def test_a_non_finite_row_fails_alone_and_leaves_nothing_behind() -> None:
    """Its keys and values are masked for its successor, but 0 x NaN is NaN."""
    model = model_for_generation()
    generator = make_generator(model)
    weight = model.get_input_embeddings().weight
    saved = weight[7].clone()
    weight[7] = float("nan")
    bad, good = [Answer(make_task([7, 7, 7, 5], 30)), Answer(make_task([5], 30))]
    generator.admit([good, bad])
    assert generator.step() == [bad]
    assert bad.error is not None and "not finite" in bad.error
    weight[7] = saved
    late = Answer(make_task([5, 6], 30))
    generator.admit([late])
    while generator.rows:
        generator.step()
    assert good.error is None and late.error is None
    check_logprobs(model, [good, late])


def test_what_stands_in_the_padding_does_not_matter() -> None:
    model = model_for_generation()
    generator = make_generator(model)
    model.get_input_embeddings().weight[0] = float("nan")
    prompts = [[5, 6], [7, 8, 9, 10], [11, 12, 13], [14]]
    answers = run_all(generator, [make_task(p, 2) for p in prompts])
    assert all(answer.error is None and 0 not in answer.tokens for answer in answers)
    check_logprobs(model, answers)


def test_a_failed_prefill_leaves_the_others_alone(model, monkeypatch) -> None:
    generator = make_generator(model)
    running = [Answer(make_task([1, 2, 3], 20, seed=i)) for i in range(3)]
    generator.admit(running)
    generator.step()

    def broken(self, *args, **kwargs):
        raise RuntimeError("out of memory")

    failed = Answer(make_task([9, 9], 5))
    generator.admit([failed])
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", broken)
        with pytest.raises(RuntimeError, match="out of memory") as error:
            generator.step()
    assert generator.drop_failed(error.value) == [failed]
    assert "prefill failed" in failed.error
    assert list(generator.rows) == running
    while generator.rows:
        generator.step()
    check_logprobs(model, running)
