"""Any overrides of any key: accepted, or refused in one line; never a crash.

Overrides are drawn from all keys of the schema, with right and wrong types, extremes,
words that are no choice, and keys that do not exist. Those that cannot be right must
be refused. What was once found is an explicit example.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from areal_dta.config.composed import ConfigError
from areal_dta.config.resolved import resolve
from areal_dta.config.schema import to_structured
from areal_dta.startup import checks
from areal_dta.startup.compose import compose, find_config

NAMES = ("gsm8k_grpo", "gsm8k_ppo", "gsm8k_sft", "gsm8k_dpo", "gsm8k_rw")
WORDS = (
    "abc",
    "",
    "auto",
    "none",
    "-",
    "a b",
    "d1",
    "fsdp:d1",
    "dta:d0",
    "é",
    "1e",
    "~",
)
NUMBERS = ("0", "-1", "1", "2", "3.5", "1e308", "-1e308", str(10**30), "nan", "inf")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A key of the schema with what its field says."""

    key: str
    kinds: frozenset[Any]
    """Types that the field takes; empty if anything."""
    choices: tuple[str, ...]


@lru_cache
def leaves(name: str) -> tuple[Leaf, ...]:
    config = to_structured(compose(find_config(name), ["hardware=cpu"]))
    return tuple(walk(config, ""))


def walk(owner: Any, prefix: str) -> Any:
    hints = typing.get_type_hints(type(owner))
    for field in dataclasses.fields(owner):
        value, key = getattr(owner, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield Leaf(key, frozenset({dict}), ())
            yield from walk(value, f"{key}.")
            continue
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        kinds = frozenset(typing.get_args(hint) if is_union else (hint,))
        plain = all(kind in (int, float, bool, str, type(None)) for kind in kinds)
        choices = field.metadata.get("choices") or ()
        yield Leaf(key, kinds if plain else frozenset(), tuple(map(str, choices)))


def is_bad(leaf: Leaf, text: str) -> bool:
    """Whether no reading of the value fits the field."""
    is_word = text.startswith("'") and text.strip("'") not in ("none", "")
    if text in ("[1]", "{a: 1}"):
        return bool(leaf.kinds) and dict not in leaf.kinds
    if leaf.choices and is_word:
        return text.strip("'") not in leaf.choices
    if leaf.kinds & {str} or not leaf.kinds:
        return False
    if text == "nan":
        return float in leaf.kinds
    return is_word


@st.composite
def override(draw: st.DrawFn, name: str) -> tuple[str, bool]:
    """One override, and whether it must be refused."""
    leaf = draw(st.sampled_from(leaves(name)))
    if draw(st.integers(0, 9)) == 0:
        return f"{leaf.key}_x=1", leaf.kinds != frozenset()
    text = draw(
        st.one_of(
            st.sampled_from(NUMBERS),
            st.sampled_from(WORDS).map(lambda word: f"'{word}'"),
            st.sampled_from(("true", "false", "null", "[1]", "{a: 1}")),
            st.sampled_from([f"'{choice}'" for choice in leaf.choices] or ["1"]),
        )
    )
    return f"{leaf.key}={text}", is_bad(leaf, text)


@st.composite
def job(draw: st.DrawFn) -> tuple[str, list[str], bool]:
    name = draw(st.sampled_from(NAMES))
    drawn = draw(st.lists(override(name), min_size=1, max_size=3))
    # Another override may replace a bad one, or its section.
    is_bad_one = len(drawn) == 1 and drawn[0][1]
    return name, [text for text, _ in drawn], is_bad_one


def try_configuration(name: str, overrides: list[str], must_fail: bool) -> None:
    try:
        composed = compose(find_config(name), ["hardware=cpu", *overrides])
        checks.check_run(resolve(to_structured(composed)), composed)
    except ConfigError as error:
        assert str(error) and "\n" not in str(error), overrides
        return
    assert not must_fail, f"accepted: {name} {overrides}"


@pytest.fixture(scope="module", autouse=True)
def models_are_looked_at_once() -> Any:
    """Models do not change, and none is looked for on the network."""
    patch = pytest.MonkeyPatch()
    from huggingface_hub import constants

    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    notes: dict[Any, Any] = {}
    for function in ("check_model", "check_served_model"):
        original = getattr(checks, function)

        def once(model: Any, *args: Any, original: Any = original) -> Any:
            config = getattr(model, "config", model)
            key = original.__name__, repr(config), args
            if key not in notes:
                notes[key] = original(model, *args)
            return notes[key]

        patch.setattr(checks, function, once)
    yield
    patch.undo()


COMMON = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
    "database": None,
}


# The same ones in each run: a change is judged by itself. The slow test explores.
@settings(max_examples=200, derandomize=True, **COMMON)
@given(job())
@example(("gsm8k_grpo", ["actor.optimizer.type='adma'"], True))
@example(("gsm8k_grpo", ["actor.optimizer.lr=nan"], True))
@example(("gsm8k_ppo", ["critic.mb_spec.max_tokens_per_mb=64"], True))
@example(("gsm8k_grpo", ["cluster.fileroot=true"], True))
@example(("gsm8k_grpo", ["scheduler=0"], False))
@example(("gsm8k_grpo", ["seed=1000000000000000000000000000000"], True))
def test_overrides(case: tuple[str, list[str], bool]) -> None:
    try_configuration(*case)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=10_000, **COMMON)
@given(job())
def test_ten_thousand_overrides(case: tuple[str, list[str], bool]) -> None:
    try_configuration(*case)
