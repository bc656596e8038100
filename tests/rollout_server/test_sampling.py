import math
import random

import pytest
import torch

from areal_dta.rollout_server.sampling import BatchSampling, RowSampling, sample
from tests.rollout_server.builders import make_generator, make_task, run_all

PROBS = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor(PROBS).log()


def draw(
    rows: list[RowSampling], logits: torch.Tensor, seed: int = 0, banned=()
) -> tuple[list[int], list[float]]:
    rng = random.Random(seed)
    sampling = BatchSampling.build(rows, logits.shape[-1], logits.device)
    return sample(logits, sampling, [rng.random() for _ in rows], banned)


def chi_square(counts: list[int], probs: list[float]) -> float:
    total = sum(counts)
    return sum(
        (count - total * p) ** 2 / (total * p)
        for count, p in zip(counts, probs, strict=True)
        if p > 0
    )


def far_out(probs: list[float]) -> float:
    """Five standard deviations above the mean of the chi-square distribution."""
    df = sum(p > 0 for p in probs) - 1
    return df + 5 * math.sqrt(2 * df)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (RowSampling(1.0, 1.0, -1), PROBS),
        (RowSampling(0.5, 1.0, -1), [p * p for p in PROBS]),
        (RowSampling(1.0, 1.0, 2), [0.4, 0.3, 0, 0, 0]),
        # The token that crosses top_p is kept.
        (RowSampling(1.0, 0.6, -1), [0.4, 0.3, 0, 0, 0]),
        (RowSampling(1.0, 0.75, -1), [0.4, 0.3, 0.15, 0, 0]),
        # Both limits look at the full distribution.
        (RowSampling(1.0, 0.75, 2), [0.4, 0.3, 0, 0, 0]),
        (RowSampling(1.0, 0.01, -1), [1.0, 0, 0, 0, 0]),
    ],
)
def test_draws_follow_the_distribution(row: RowSampling, expected: list[float]) -> None:
    num_draws = 20_000
    tokens, _ = draw([row] * num_draws, LOGITS.expand(num_draws, -1))
    expected = [p / sum(expected) for p in expected]
    counts = [tokens.count(t) for t in range(len(PROBS))]
    assert all(c == 0 for c, p in zip(counts, expected, strict=True) if p == 0)
    if sum(p > 0 for p in expected) > 1:
        assert chi_square(counts, expected) < far_out(expected)


def test_a_wrong_distribution_would_be_noticed() -> None:
    num_draws = 20_000
    tokens, _ = draw(
        [RowSampling(1.0, 1.0, -1)] * num_draws, LOGITS.expand(num_draws, -1)
    )
    counts = [tokens.count(t) for t in range(len(PROBS))]
    wrong = [0.38, 0.32, 0.15, 0.1, 0.05]
    assert chi_square(counts, wrong) > far_out(wrong)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, -1), (0.5, 3)])
def test_logprob_is_of_the_whole_tempered_distribution(
    temperature: float, top_p: float, top_k: int
) -> None:
    tokens, logprobs = draw(
        [RowSampling(temperature, top_p, top_k)] * 50, LOGITS.expand(50, -1)
    )
    expected = torch.log_softmax(LOGITS / temperature, dim=-1)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(float(expected[token]), abs=1e-6)


def test_greedy_takes_the_best_and_reports_temperature_one() -> None:
    rows = [RowSampling(0.0, 1.0, -1), RowSampling(1.0, 0.9, 2)] * 20
    tokens, logprobs = draw(rows, LOGITS.expand(40, -1))
    assert tokens[::2] == [0] * 20
    assert logprobs[::2] == pytest.approx([math.log(0.4)] * 20, abs=1e-6)
    assert 1 in tokens[1::2]


def test_rows_keep_their_own_options() -> None:
    rows = [RowSampling(1.0, 1.0, 1), RowSampling(1.0, 1.0, -1)] * 500
    tokens, _ = draw(rows, LOGITS.expand(1000, -1))
    assert set(tokens[::2]) == {0}
    assert set(tokens[1::2]) == {0, 1, 2, 3, 4}


def test_rounding_does_not_cut_a_row_that_keeps_everything() -> None:
    logits = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0))
    rows = [RowSampling(1.0, 1.0, -1), RowSampling(1.0, 0.5, -1)]
    sampling = BatchSampling.build(rows, 20_000, logits.device)
    # Sorted from high to low, so the last uniform number draws the rarest token.
    tokens, _ = sample(logits, sampling, [1.0 - 2**-53, 1.0 - 2**-53])
    assert tokens[0] == int(logits[0].argmin())
    assert logits[1, tokens[1]] > logits[1].median()


def test_banned_tokens_are_not_drawn_but_count_in_the_logprob() -> None:
    rows = [RowSampling(1.0, 1.0, -1), RowSampling(0.0, 1.0, -1)]
    for seed in range(50):
        tokens, logprobs = draw(
            rows, LOGITS.expand(2, -1), seed, [(0, (0, 1)), (1, (0,))]
        )
        assert tokens[0] not in (0, 1)
        assert tokens[1] == 1
        for token, logprob in zip(tokens, logprobs, strict=True):
            assert logprob == pytest.approx(math.log(PROBS[token]), abs=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits_give_nan_in_their_row_only(value: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = value
    _, logprobs = draw([RowSampling(1.0, 0.9, 4)] * 3, logits)
    assert math.isnan(logprobs[1])
    assert not math.isnan(logprobs[0]) and not math.isnan(logprobs[2])


def test_a_row_with_every_token_banned_gives_nan() -> None:
    _, logprobs = draw(
        [RowSampling(1.0, 1.0, -1)], LOGITS[None], banned=[(0, range(len(PROBS)))]
    )
    assert math.isnan(logprobs[0])


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_extreme_uniforms_draw_possible_tokens(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    sampling = BatchSampling.build([RowSampling(1.0, 1.0, -1)], 4, logits.device)
    tokens, _ = sample(logits, sampling, [uniform])
    assert tokens[0] in (1, 2)


def test_generated_tokens_follow_the_model(model) -> None:
    prompt, num_draws = [5, 9, 3], 4000
    generator = make_generator(model, max_batch_size=num_draws)
    answers = run_all(
        generator, [make_task(prompt, 1, seed=f"draw/{i}") for i in range(num_draws)]
    )
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    probs = torch.softmax(logits, dim=-1).tolist()
    counts = [0] * len(probs)
    for answer in answers:
        counts[answer.tokens[0]] += 1
    assert chi_square(counts, probs) < far_out(probs)
