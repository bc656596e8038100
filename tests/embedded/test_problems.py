"""The problem generator: right answers, distinct questions, disjoint splits."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_dta.embedded import generate_problems, problems
from areal_dta.embedded.calculator import evaluate
from areal_dta.embedded.problems import iter_problems, split_of


def test_the_written_steps_lead_to_the_final_answer():
    for problem in generate_problems(500, seed=3):
        *steps, last = problem["answer"].split("\n")
        assert 1 <= len(steps) <= 3
        result = None
        for step in steps:
            expression, value = step.split("=")
            assert evaluate(expression) == int(value) >= 0
            if result is not None:  # each step goes on from the one before
                assert expression.startswith(f"{result}")
            result = int(value)
        assert last == f"#### {result}"


def test_the_numbers_of_the_steps_stand_in_the_question():
    for problem in islice(iter_problems(seed=4), 200):
        words = problem.question.replace("$", "").replace(".", " ").split()
        first, *others = problem.steps
        assert {str(first.left), str(first.right)} <= set(words)
        assert {str(step.right) for step in others} <= set(words)


def test_a_known_problem():
    step = problems.Step(6, "*", 9), problems.Step(54, "+", 15)
    assert problems.Problem("?", step).solution == "6*9=54\n54+15=69\n#### 69"


def test_the_same_arguments_give_the_same_problems():
    assert generate_problems(50, 7, "train") == generate_problems(50, 7, "train")
    assert generate_problems(50, 7, "train") != generate_problems(50, 8, "train")


def test_a_longer_list_starts_with_the_shorter_one():
    assert generate_problems(50, 7)[:20] == generate_problems(20, 7)


def test_questions_are_distinct_and_varied():
    questions = [p["question"] for p in generate_problems(2000, seed=0)]
    assert len(set(questions)) == 2000
    assert len({q.split()[0] for q in questions}) > 10


@given(st.integers(0, 10**9), st.integers(0, 10**9))
@settings(max_examples=20, deadline=None)
def test_splits_are_disjoint_for_all_seeds(train_seed, test_seed):
    train = {p["question"] for p in generate_problems(300, train_seed, "train")}
    test = {p["question"] for p in generate_problems(50, test_seed, "test")}
    assert not train & test
    assert {split_of(q) for q in train} == {"train"}
    assert {split_of(q) for q in test} == {"test"}


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="split='dev'"):
        generate_problems(1, 0, "dev")
    with pytest.raises(ValueError, match="num=-1"):
        generate_problems(-1, 0)
    assert generate_problems(0, 0) == []


def test_an_exhausted_generator_says_so(monkeypatch):
    one = problems.Problem("How many?", (problems.Step(1, "+", 1),))
    monkeypatch.setattr(problems, "sample_problem", lambda rng: one)
    assert len(generate_problems(1, 0)) == 1
    with pytest.raises(ValueError, match="no new problem"):
        generate_problems(2, 0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("6*9", 54), ("54 + 15", 69), ("-(2-5)*4", 12), ("7/2", 3.5), ("8/2", 4)],
)
def test_calculator(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "6*", "1/0", "9**9", "x+1", "True+1", "abs(1)", "'a'*3", "1" * 65, "1e999*0"],
)
def test_calculator_refuses_everything_else(expression):
    with pytest.raises(ValueError):
        evaluate(expression)
