"""A seeded generator of arithmetic word problems in the style of GSM8K.

Each problem starts from a count or from a product ("6 boxes with 9 apples each"),
changes it by buying or giving away, and may end with a sale of everything. The
reference answer shows one calculation per line and the result on the last one:

    6*9=54
    54+15=69
    #### 69

Numbers stay at or below 250, so that a model of a million parameters can learn them.
The standard library's ``random.Random`` gives the same problems on every platform.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SPLITS = ("train", "test")
# One question in this many belongs to the test split, whatever the seed.
_QUESTIONS_PER_TEST_QUESTION = 10
# Duplicates and questions of the other split are drawn again, at most this often.
_MAX_DRAWS_PER_PROBLEM = 200

_MAX_START = 50
_MAX_CHANGE = 20
_MAX_COUNT = 100
_MAX_COUNT_FOR_SALE = 50

_NAMES = "Tom Anna Ben Mia Sam Lily Jack Emma Leo Nina Max Zoe".split()
_ITEMS = (
    "apples books coins pens eggs cards shells stamps cookies marbles flowers lemons"
).split()
_CONTAINERS = "boxes bags packs jars".split()

_COUNT_STARTS = (
    "{name} has {a} {items}.",
    "{name} finds {a} {items}.",
    "There are {a} {items} on the table of {name}.",
)
_PRODUCT_STARTS = (
    "{name} has {a} {containers} with {b} {items} each.",
    "{name} buys {a} {containers} of {b} {items}.",
    "{name} fills {a} {containers} with {b} {items} each.",
)
_ADDITIONS = (
    "{name} buys {c} more.",
    "{friend} gives {name} {c} more.",
    "Then {name} finds {c} more {items}.",
)
_SUBTRACTIONS = (
    "{name} gives {c} to {friend}.",
    "{name} loses {c} of them.",
    "Then {friend} takes {c} {items}.",
)
_SALES = (
    "{name} sells them all for ${p} each.",
    "Then {friend} buys all of them at ${p} each.",
)
_COUNT_QUESTIONS = (
    "How many {items} are there now?",
    "How many {items} does {name} have in the end?",
)
_MONEY_QUESTIONS = (
    "How much money does {name} get?",
    "How many dollars does {name} earn?",
)

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One calculation on non-negative integers."""

    left: int
    operator: str
    right: int

    @property
    def result(self) -> int:
        return _OPERATORS[self.operator](self.left, self.right)

    @property
    def expression(self) -> str:
        return f"{self.left}{self.operator}{self.right}"

    def __str__(self) -> str:
        return f"{self.expression}={self.result}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and the calculations that answer it; the last result is the answer."""

    question: str
    steps: tuple[Step, ...]

    @property
    def result(self) -> int:
        return self.steps[-1].result

    @property
    def solution(self) -> str:
        """The reference answer: a line per step, then ``#### result``."""
        return "\n".join([*map(str, self.steps), f"#### {self.result}"])


def split_of(question: str) -> str:
    """Return the split that a question belongs to, from its text alone.

    Splits are therefore disjoint for all seeds and sizes, and a model trained on any
    "train" problems has never seen a "test" question.
    """
    is_test = zlib.crc32(question.encode()) % _QUESTIONS_PER_TEST_QUESTION == 0
    return "test" if is_test else "train"


def sample_problem(rng: random.Random) -> Problem:
    """Draw one problem of one to three steps, from either split."""
    name, friend = rng.sample(_NAMES, 2)
    words = {
        "name": name,
        "friend": friend,
        "items": rng.choice(_ITEMS),
        "containers": rng.choice(_CONTAINERS),
    }
    num_steps = rng.choice((1, 1, 2, 2, 2, 3, 3))
    steps: list[Step] = []
    sentences: list[str] = []

    def say(templates: tuple[str, ...], **numbers: int) -> None:
        sentences.append(rng.choice(templates).format(**words, **numbers))

    # Start from a product or from a count.
    if rng.random() < 0.5:
        step = Step(rng.randint(2, 9), "*", rng.randint(2, 9))
        say(_PRODUCT_STARTS, a=step.left, b=step.right)
        steps.append(step)
        count = step.result
    else:
        count = rng.randint(5, _MAX_START)
        say(_COUNT_STARTS, a=count)

    # Buy, give away or sell, in ranges that keep every result at or below 250.
    sells = False
    while len(steps) < num_steps:
        is_last = len(steps) == num_steps - 1
        if is_last and count <= _MAX_COUNT_FOR_SALE and rng.random() < 0.35:
            sells = True
            step = Step(count, "*", rng.randint(2, 5))
            say(_SALES, p=step.right)
        elif count <= 5 or (count <= _MAX_COUNT - _MAX_CHANGE and rng.random() < 0.5):
            step = Step(count, "+", rng.randint(2, _MAX_CHANGE))
            say(_ADDITIONS, c=step.right)
        else:
            step = Step(count, "-", rng.randint(2, min(_MAX_CHANGE, count - 1)))
            say(_SUBTRACTIONS, c=step.right)
        steps.append(step)
        count = step.result

    say(_MONEY_QUESTIONS if sells else _COUNT_QUESTIONS)
    return Problem(" ".join(sentences), tuple(steps))


def iter_problems(seed: int, split: str | None = None) -> Iterator[Problem]:
    """Generate problems with distinct questions endlessly, of one split or of both.

    Raises:
        ValueError: unknown split, or no new question is found any more.
    """
    if split is not None and split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown; use one of {SPLITS} or None.")
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        for _ in range(_MAX_DRAWS_PER_PROBLEM):
            problem = sample_problem(rng)
            question = problem.question
            if question in seen or (split is not None and split_of(question) != split):
                continue
            seen.add(question)
            yield problem
            break
        else:
            raise ValueError(
                f"no new problem in {_MAX_DRAWS_PER_PROBLEM} draws after {len(seen)}; "
                f"ask for fewer than {len(seen)} problems."
            )
