"""Finding and composing configurations, without the schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_dta.config.composed import ConfigError, did_you_mean
from areal_dta.startup.compose import compose, find_config, project_config_dir, run_dir

MAIN = project_config_dir() / "gsm8k_grpo.yaml"


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["gsm8k_grpo.yaml", "gsm8k_grpo"])
def test_bare_name_in_project(cwd: Path, name: str) -> None:
    assert find_config(name) == MAIN


def test_working_directory_comes_first(cwd: Path) -> None:
    (cwd / "gsm8k_grpo.yaml").write_text("seed: 7\n")
    assert find_config("gsm8k_grpo.yaml") == cwd / "gsm8k_grpo.yaml"


def test_a_path_is_not_looked_up_in_the_project(cwd: Path) -> None:
    (cwd / "mine").mkdir()
    (cwd / "mine" / "a.yaml").write_text("seed: 7\n")
    assert find_config("mine/a.yaml") == cwd / "mine" / "a.yaml"
    with pytest.raises(ConfigError, match="no configuration file './gsm8k_grpo.yaml'"):
        find_config("./gsm8k_grpo.yaml")


def test_missing_file_names_the_closest(cwd: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'gsm8k_grpo.yaml'") as error:
        find_config("gsm8k_gpro.yaml")
    assert "\n" not in str(error.value)


def test_group_options_and_overrides() -> None:
    composed = compose(MAIN, ["hardware=cpu", "seed=5", "actor.optimizer.lr=3e-5"])
    assert composed.choices == {
        "hardware": "cpu",
        "model": "tiny",
        "scheduler": "local",
    }
    assert composed.config.seed == 5
    assert composed.config.actor.optimizer.lr == 3e-5
    assert composed.config.actor.dtype == "float32"
    assert composed.config.actor.backend == "dta:d1"


def test_a_model_sets_what_depends_on_it() -> None:
    config = compose(MAIN, ["hardware=cpu", "model=qwen3-1.7b"]).config
    assert config.actor.path == "Qwen/Qwen3-1.7B"
    assert config.tokenizer_path == "Qwen/Qwen3-1.7B"
    assert config.gconfig.max_new_tokens > 48
    assert "note" not in config  # it speaks of the tiny model


def test_override_of_a_key_that_the_yaml_leaves_out() -> None:
    composed = compose(MAIN, ["actor.eps_clip_higher=0.3", "dynamic_bs=true"])
    assert composed.config.actor.eps_clip_higher == 0.3
    assert composed.config.dynamic_bs is True


def test_auto_leaves_nothing_behind() -> None:
    composed = compose(MAIN, [])
    assert composed.choices["hardware"] == "auto"
    assert "hardware" not in composed.config


def test_own_file_may_use_the_projects_groups(cwd: Path) -> None:
    (cwd / "mine.yaml").write_text(
        "defaults: [{hardware: cpu}, {model: tiny}, _self_]\n"
        "experiment_name: e\ntrial_name: t\ncluster: {fileroot: out}\n"
    )
    (cwd / "data").mkdir()  # not a group, whatever is in it
    (cwd / "data" / "x.yaml").write_text("a: 1\n")
    composed = compose(find_config("mine.yaml"), ["hardware=gpu"])
    assert composed.choices == {"hardware": "gpu", "model": "tiny"}
    assert composed.groups == ("hardware", "model", "scheduler")
    assert run_dir(composed) == cwd / "out" / "e" / "t"
    budgets = {"block_tokens": "auto", "retain_tokens": "auto"}
    assert composed.config["actor"]["dta"] == budgets


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["scheduler=0"],
            "scheduler=0: expected the name of one option of 'scheduler'",
        ),
        (["scheduler=null"], "expected the name of one option .*, such as local, ray"),
        (["model=[tiny,qwen3-8b]"], "expected the name of one option of 'model'"),
        (["scheduler={type: ray}"], "expected the name of one option of 'scheduler'"),
        (["scheduler=../hardware/cpu"], "expected the name of one option"),
        (["~scheduler=3"], "expected the name of one option of 'scheduler'"),
        (["hardware=cpux"], r"hardware=cpux: no such option \(did you mean 'cpu'\?\)"),
        (["model=qwen3"], "expected one of .*qwen3-0.6b"),
        (["actor.backend"], "cannot read the override 'actor.backend': missing EQUAL"),
        (["seed=1,2"], "seed=1,2"),
        (["a=[1"], r"cannot read the override 'a=\[1'.*expected key=value$"),
    ],
)
def test_wrong_overrides_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        compose(MAIN, overrides)
    assert "\n" not in str(error.value)


def test_broken_yaml_is_one_line(cwd: Path) -> None:
    (cwd / "broken.yaml").write_text("a: [1, 2\nb: 3\n")
    with pytest.raises(ConfigError, match="broken.yaml") as error:
        compose(cwd / "broken.yaml", [])
    assert "\n" not in str(error.value)


def test_run_dir_needs_its_names(cwd: Path) -> None:
    (cwd / "mine.yaml").write_text("experiment_name: e\ncluster: {fileroot: out}\n")
    with pytest.raises(ConfigError, match="no value for trial_name"):
        run_dir(compose(cwd / "mine.yaml", []))


def test_did_you_mean() -> None:
    assert did_you_mean("trian", ["train", "eval"]) == " (did you mean 'train'?)"
    assert did_you_mean("zzz", ["train"]) == ""
