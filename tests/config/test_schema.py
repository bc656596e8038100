"""The schema: every YAML fits it, and what does not is refused in one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from areal_dta.config.composed import ConfigError
from areal_dta.config.resolved import resolve
from areal_dta.config.schema import DTAGRPOConfig, to_structured
from areal_dta.startup.compose import compose, find_config, project_config_dir
from areal_dta.startup.train_process import save_config

CONFIGS = project_config_dir()
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
EXPERIMENTS = sorted(path.name for path in CONFIGS.glob("*.yaml"))


def load(*overrides: str, name: str = "gsm8k_grpo.yaml") -> Any:
    return to_structured(compose(find_config(name), ["hardware=cpu", *overrides]))


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        k: v for key in value for k, v in flat(value[key], f"{prefix}.{key}").items()
    }


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("name", "model"),
    [(name, "tiny") for name in EXPERIMENTS]
    + [("gsm8k_grpo.yaml", model) for model in MODELS],
)
def test_every_yaml_fits_the_schema(name: str, hardware: str, model: str) -> None:
    config = load(f"hardware={hardware}", f"model={model}", name=name)
    assert config.actor.path
    assert config.tokenizer_path == config.actor.path
    assert config.actor.dtype == {"cpu": "float32", "gpu": "bfloat16"}[hardware]
    for section in resolve(config).models:
        assert section.config.dtype == config.actor.dtype
        assert section.config.scheduling_spec == config.actor.scheduling_spec
        assert section.config.disable_dropout
    if isinstance(config, DTAGRPOConfig):
        assert config.rollout.max_head_offpolicyness > 0
        assert config.actor.use_decoupled_loss


def test_configuration_classes_can_be_imported_from_the_package() -> None:
    import areal_dta.config as package

    assert package.DTAGRPOConfig is DTAGRPOConfig
    assert not hasattr(package, "DTAGRPPOConfig")


def test_grpo_normalizes_over_the_samples_of_a_prompt() -> None:
    config = load()
    assert config.actor.reward_norm.group_size == config.gconfig.n_samples


def test_the_dense_twin_differs_in_one_line() -> None:
    ours, twin = (
        flat(OmegaConf.to_container(composed.config, resolve=True))
        for composed in (
            compose(find_config("gsm8k_grpo"), ["hardware=cpu"]),
            compose(
                find_config("gsm8k_grpo"), ["hardware=cpu", "actor.backend=fsdp:d1"]
            ),
        )
    )
    differing = {k: (ours[k], twin[k]) for k in ours if ours[k] != twin[k]}
    assert differing == {".actor.backend": ("dta:d1", "fsdp:d1")}
    assert ours.keys() == twin.keys()


@pytest.mark.parametrize("name", ["sft", "rw"])
def test_the_dense_twins_of_other_algorithms_differ_in_one_line(name: str) -> None:
    ours = load(name=f"gsm8k_{name}")
    twin = load("actor.backend=fsdp:d1", name=f"gsm8k_{name}")
    assert ours != twin
    ours.actor.backend = "fsdp:d1"
    assert ours == twin


def test_presets_for_rollouts_do_not_reach_jobs_without_any() -> None:
    composed = compose(find_config("gsm8k_sft"), ["hardware=cpu", "model=tiny"])
    assert {"rollout", "gconfig"} < set(composed.config)
    assert not hasattr(to_structured(composed), "rollout")
    with pytest.raises(ConfigError, match="rollout: algorithm=sft has no rollouts"):
        load("rollout.backend=local:d1", name="gsm8k_sft")


def test_options_of_the_tree_engine() -> None:
    options = load("actor.dta.block_tokens=64", "actor.dta.retain_tokens=0").actor.dta
    assert (options.block_tokens, options.retain_tokens) == (64, 0)
    assert load().actor.dta.retain_tokens is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.optimizer.lrr=1", r"'actor.optimizer.lrr' \(did you mean 'actor.opt"),
        ("actor.dta.block_token=1", r"did you mean 'actor.dta.block_tokens'"),
        ("total_train_step=1", r"did you mean 'total_train_steps'"),
        ("modl=tiny", r"unknown key 'modl' \(did you mean 'model'\?\)"),
        ("xyzzy=1", r"unknown key 'xyzzy'$"),
        ("seed=abc", "seed: Value 'abc' of type 'str' could not be converted to Int"),
        ("actor.dta.block_tokens=0", "block_tokens=0; expected a whole number >= 1"),
        ("actor.dta.retain_tokens=-1", "expected a whole number >= 0, null or auto"),
        ("launch.grace_seconds=0", "launch.grace_seconds=0.0; expected a positive"),
        ("actor.dtype=float8", "dtype must be one of"),
        ("saver.mode=never", "Invalid mode 'never'"),
        ("recover.mode=true", r"recover.mode expects a text.*\(mode: .on.\)"),
        ("experiment_name=???", "no value for experiment_name"),
        ("actor.path=${no.such.key}", "Interpolation key 'no.such.key' not found"),
        (
            "algorithm=sf",
            r"unknown \(did you mean 'sft'\?\); expected one of",
        ),
        ("critic.backend=dta:d1", "no value for critic.experiment_name"),
        ("total_train_epochs=0", "total_train_epochs must be positive"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(override)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_saved_configuration_can_be_run_again(tmp_path: Path, name: str) -> None:
    config = load("seed=3", "actor.backend=fsdp:d1", name=name)
    save_config(config, tmp_path / "config.yaml")
    again = to_structured(compose(tmp_path / "config.yaml", []))
    assert again == config
