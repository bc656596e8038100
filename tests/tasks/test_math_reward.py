"""What the reward pays for, and that nothing makes it raise or hang."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_model.corpus import Fault, plain_answer

from areal_dta.embedded import generate_problems
from areal_dta.tasks.math_reward import math_reward_fn, parse_final_answer
from tests.tasks.dressed_numbers import Dressed, dressed, plain
from tests.tasks.reward_cases import CASES

ROOT = Path(__file__).parents[2]
SHARED = ROOT / "../shared/data/gsm8k"


def reward(completion, answer):
    return math_reward_fn("", completion, [], [], answer)


@pytest.mark.parametrize(
    "completion",
    [
        "6*9=54\n54+15=69\n#### 69",
        "6*9=54\n54+15=69\n#### 69<|im_end|>",
        "#### 69\n",
        "#### $69.00",
        "#### 69 apples",
        "#### 70\nNo, wait.\n#### 69",
        "#### Final answer\nThe answer is 69.",
        "#### 3. Total\nSo it is \\boxed{69}.",
        "\\boxed{69}",
        "\\[ 54 + 15 = 69 \\]\n\nThus, the answer is \\(\\boxed{69}\\).",
        "\\boxed{68}, no, \\boxed{69}, which is more than 5.",
        "\\boxed{\\$69}",
        "\\boxed{69\\%}",
        "\\boxed{69 \\text{ apples}}",
        "\\boxed{x = 69}",
        "\\boxed{\\frac{138}{2}}",
        "\\boxed{54 + 15}",
        "The total is **69** dollars.",
        "**Answer: \\$69**",
        "She makes $54 + $15 = $69 every day.",
        "The final answer is $69$.",
        "The answer is 69 because 54 and 15 make it.",
        "69 percent",
        "it is 17</think>\n\n69",
        "<think>it is 17 #### 17</think>\n\n#### 69",
    ],
)
def test_right_answers_are_paid(completion):
    assert reward(completion, "69") == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "I do not know.",
        "#### 70",
        "#### -69",
        "#### 6.9",
        "#### 69\n#### 70",
        "6*9=54\n54+15=69\n####",
        "6*9=54\n54+15=69\n####<|im_end|>",
        "6*9=54\n54+15=69\n#### yes",
        "\\boxed{}, not 70",
        "\\boxed{69}, no, \\boxed{70}",
        "<think>it must be 69",
        "<think>69</think>",
        "\\boxed{69^{1}}",  # plain arithmetic only
    ],
)
def test_wrong_and_absent_answers_are_not_paid(completion):
    assert reward(completion, "69") == 0.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### 1,234", "1234"),
        ("\\boxed{1{,}234}", "1234"),
        ("\\boxed{1\\,234}", "1234"),
        ("#### 1234", "1,234"),
        ("#### -5", "-5"),
        ("#### 0.5", "1/2"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("#### 69", "6*9=54\n54+15=69\n#### 69"),
        ("#### 69", 69),
    ],
)
def test_the_same_number_in_other_clothes(completion, answer):
    assert reward(completion, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer", "paid"), CASES)
def test_the_table(completion, answer, paid):
    assert reward(completion, answer) == float(paid)


def assert_no_other_is_paid(example: Dressed) -> None:
    for other in example.others:
        if abs(other - example.value) > 1e-5:
            assert reward(example.text, plain(other)) == 0.0


@given(dressed())
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_a_number_in_any_clothes(example):
    assert reward(example.text, plain(example.value)) == 1.0
    assert_no_other_is_paid(example)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_numbers_in_any_clothes():
    paid = []

    @given(dressed())
    @settings(
        max_examples=10_000,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(example):
        paid.append(reward(example.text, plain(example.value)))
        assert_no_other_is_paid(example)

    check()
    assert len(paid) >= 10_000 and sum(paid) >= 0.999 * len(paid)


def test_an_unusable_reference_pays_nobody(warnings):
    assert reward("#### 69", "sixty-nine") == 0.0
    assert len(warnings) == 1 and "'sixty-nine' is not a number" in warnings[0]


def test_additional_columns_are_accepted():
    assert math_reward_fn(None, "#### 1", None, None, answer="1", messages=[]) == 1.0


def test_the_reference_solutions_are_paid():
    for problem in generate_problems(100, seed=5):
        final = problem["answer"].rpartition("#### ")[2]
        assert reward(problem["answer"], final) == 1.0


def test_the_faults_of_the_training_mix_are_really_wrong():
    import random

    from areal_dta.embedded.problems import sample_problem

    rng = random.Random(0)
    for _ in range(100):
        problem = sample_problem(rng)
        answer = str(problem.result)
        for fault in (Fault.FORMAT, Fault.LAST_STEP):
            assert reward(plain_answer(rng, problem, fault), answer) == 0.0
        # A guess is text of the right form, and paid when it is lucky.
        for fault in (Fault.NONE, Fault.NO_STEPS):
            assert reward(plain_answer(rng, problem, fault), answer) == 1.0


@given(st.text(max_size=80), st.text(max_size=20))
@settings(max_examples=100, deadline=None)
def test_never_raises(completion, answer):
    assert reward(completion, answer) in (0.0, 1.0)


# Digits, operators and LaTeX together reach further into the parser than any text.
@given(
    st.lists(
        st.sampled_from(
            [*"0159.,+-*/^!()=${} ", "**", "####", "\\boxed{", "\\frac{", "answer is"]
        ),
        max_size=30,
    ).map("".join)
)
@settings(max_examples=200, deadline=None)
def test_never_raises_on_mathematics(completion):
    assert reward(completion, "5") in (0.0, 1.0)


def test_works_outside_the_main_thread():
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(reward("#### 5", "5")))
    thread.start()
    thread.join(60)
    assert rewards == [1.0]


def test_hostile_texts_do_not_hang():
    hostile = [
        "9**9**9**9",
        "\\boxed{9^{9^{9}}}",
        "\\boxed{99999999!}",
        "\\boxed{\\binom{1000000000}{500000000}}",
        "\\boxed{\\gcd(9^{9^9}, 3)}",
        "\\boxed{" + "(" * 25 + "1" + ")" * 25 + "}",
        "\\boxed{" * 300 + "1" + "}" * 300,
        "(" * 900 + "1" + ")" * 900,
        "1" + "*9" * 900,
        "1/" * 900 + "1",
        "9" * 100_000,
        "1/0",
        "final answer is " * 10_000,
        "1e999999999",
    ]
    # In a process of its own: no thread or signal ends a power within one big call.
    code = (
        "import json, sys; from areal_dta.tasks.math_reward import math_reward_fn as r;"
        "print([r('', t, [], [], '5') for t in json.load(sys.stdin)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(hostile),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0.0] * len(hostile)


def test_areal_calls_it_in_its_process_pool():
    from areal.api.reward_api import AsyncRewardWrapper

    wrapper = AsyncRewardWrapper(math_reward_fn, timeout_seconds=60, max_workers=1)
    try:
        result = asyncio.run(
            wrapper("", "#### 69<|im_end|>", [1], [2], answer="69", messages=[])
        )
    finally:
        AsyncRewardWrapper._atexit_shutdown_all()
    assert result == 1.0


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/gsm8k")
def test_agrees_with_the_published_verdicts_on_model_solutions():
    num_correct = 0
    lines = (SHARED / "model_solutions.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        problem = json.loads(line)
        gold = problem["answer"].rpartition("A:")[2].strip()
        assert parse_final_answer(gold) is not None
        for solution in problem["solutions"]:
            assert reward(solution["text"], gold) == solution["correct"]
            num_correct += solution["correct"]
    assert num_correct > 100
