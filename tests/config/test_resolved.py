"""Backends are parsed once, for all models and servers of a run."""

from __future__ import annotations

from typing import Any

import pytest

from areal_dta.config.backends import ROLLOUT_BACKENDS, TRAIN_BACKENDS, parse_backend
from areal_dta.config.composed import ConfigError
from areal_dta.config.resolved import resolve
from areal_dta.config.schema import to_structured
from areal_dta.startup.compose import compose, find_config


def load(*overrides: str, name: str = "gsm8k_grpo.yaml") -> Any:
    return to_structured(compose(find_config(name), ["hardware=cpu", *overrides]))


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("gsm8k_grpo", {"actor": "actor"}),
        ("gsm8k_ppo", {"actor": "actor", "critic": "critic", "ref": "actor"}),
        ("gsm8k_sft", {"actor": "lm"}),
        ("gsm8k_dpo", {"actor": "dpo", "ref": "dpo"}),
        ("gsm8k_rw", {"actor": "rw"}),
    ],
)
def test_models_on_training_engines(name: str, sections: dict[str, str]) -> None:
    config = load(name=name)
    run = resolve(config)
    assert {s.name: s.kind for s in run.models} == sections
    for section in run.for_areal().models:
        assert (section.config.engine, section.config.backend) == ("dta", "fsdp:d1")


def test_a_teacher_is_one_of_them() -> None:
    config = load(
        "+teacher={engine_type: train, train: {backend: 'dta:d2', experiment_name: e, "
        "trial_name: t, path: p}}"
    )
    run = resolve(config)
    assert [s.name for s in run.models] == ["actor", "teacher.train"]
    assert run.for_areal().config.teacher.train.backend == "fsdp:d2"


def test_worker_pools_are_models_and_the_servers_in_use() -> None:
    servers = (
        "+teacher={rollout: {backend: 'sglang:d2', experiment_name: e, trial_name: t}}"
    )
    run = resolve(
        load("critic=null", "rollout.backend=local:d3", servers, name="gsm8k_ppo")
    )
    ranks = {pool.name: pool.backend.num_ranks for pool in run.worker_pools}
    assert ranks == {"actor": 1, "ref": 1, "rollout": 3, "teacher.rollout": 2}
    assert [pool.name for pool in resolve(load(name="gsm8k_sft")).worker_pools] == [
        "actor"
    ]


@pytest.mark.parametrize(
    ("spec", "engine", "areal", "ranks"),
    [
        ("dta:d2", "dta", "fsdp:d2", 2),
        ("fsdp:d2t2", "fsdp", "fsdp:d2t2", 4),
        ("megatron:d1p2", "megatron", "megatron:d1p2", 2),
    ],
)
def test_training_backends(spec: str, engine: str, areal: str, ranks: int) -> None:
    backend = parse_backend(spec, "actor.backend", TRAIN_BACKENDS)
    assert (backend.engine, backend.areal) == (engine, areal)
    assert backend.num_ranks == ranks


def test_rollout_backend() -> None:
    backend = parse_backend("local:d3", "rollout.backend", ROLLOUT_BACKENDS)
    assert (backend.engine, backend.areal, backend.dp_size) == ("local", "sglang:d3", 3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dat:d1", r"unknown backend 'dat' \(did you mean 'dta'\?\)"),
        ("sglang:d1", "expected one of dta, fsdp, megatron, archon"),
        ("dta", "no parallelism; expected e.g. dta:d1"),
        ("dta:", "no parallelism"),
        ("dta:x1", "cannot read the parallelism 'x1'"),
        ("dta:d1t2", "dta is data parallel only; expected dta:d2"),
    ],
)
def test_bad_backends(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_backend(spec, "actor.backend", TRAIN_BACKENDS)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"actor.backend={spec}")


def test_translation_leaves_the_original_alone() -> None:
    config = load("actor.backend=dta:d2")
    run = resolve(config).for_areal()
    translated: Any = run.config
    assert run.actor.config is translated.actor
    assert (translated.actor.backend, translated.actor.engine) == ("fsdp:d2", "dta")
    assert (translated.rollout.backend, translated.rollout.engine) == (
        "sglang:d1",
        "local",
    )
    assert config.actor.backend == "dta:d2"
    assert config.actor.engine == ""
