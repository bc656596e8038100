"""What would fail once everything is up is refused at start-up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from areal_dta import launch
from areal_dta.config.composed import ConfigError
from areal_dta.embedded import tiny_model_path
from areal_dta.startup import checks
from areal_dta.startup.check_models import check_model
from areal_dta.startup.prepare import prepare
from tests.models import tiny_model
from tests.startup.test_checks import check, load

AGENT = {"name": "gsm8k_calculator"}
PPO = {"name": "gsm8k_ppo"}


@pytest.mark.parametrize(
    ("job", "override", "message"),
    [
        (AGENT, "scheduler.type=ray", "is an agent.*cannot start one; use scheduler=l"),
        (
            PPO,
            "critic.mb_spec.max_tokens_per_mb=4096",
            "critic.mb_spec.max_tokens_per_mb=4096, but .*8192 tokens; set it to 8192",
        ),
        (
            PPO,
            "ref.mb_spec.max_tokens_per_mb=1",
            "ref.mb_spec.max_tokens_per_mb=1, b",
        ),
        ({}, "actor.optimizer.type=adma", "mean 'adam'.*expected one of adam, sgd"),
        ({}, "actor.optimizer.lr=nan", "actor.optimizer.lr=nan; expected a number"),
        ({}, "gconfig.max_new_tokens=0", "gconfig.max_new_tokens=0; expected 1 or"),
        ({}, "actor.dta.verify_every=-1", "dta.verify_every=-1; expected a whole"),
    ],
)
def test_refused(job: dict[str, str], override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check(override, **job)
    assert "\n" not in str(error.value)


def test_the_dry_run_of_an_agent_under_ray_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--config", "gsm8k_calculator", "--dry-run", "hardware=cpu"]
    assert launch.main([*argv, "scheduler=ray"]) == 2
    assert "is an agent" in capsys.readouterr().err


def test_the_dry_run_names_the_engine() -> None:
    from areal_dta.startup.dry_run import plan_text

    for backend, words in {
        "fsdp:d1": "dense twin (fsdp: AReaL's engine, our dispatch",
        "areal-fsdp:d1": "AReaL's own engine and controller (areal-fsdp)",
    }.items():
        run = prepare("gsm8k_grpo", ["hardware=cpu", f"actor.backend={backend}"])
        assert words in plan_text(run)
        assert ("packs sequences" in plan_text(run)) is (backend == "areal-fsdp:d1")


def test_areals_own_engine_needs_an_even_batch() -> None:
    with pytest.raises(ConfigError, match="cannot be shared evenly by the 3"):
        check("actor.backend=areal-fsdp:d3")
    assert check("actor.backend=fsdp:d3") == []


def model_with(path: Path, **entries: Any) -> Path:
    shutil.copytree(tiny_model_path(), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | entries))
    return path


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    code = {"auto_map": {"AutoConfig": "code.Config"}}
    path = model_with(tmp_path / "model", **code)
    with pytest.raises(ConfigError, match="brings code of its own .*in config.json"):
        check(f"actor.path={path}")
    shutil.copytree(tiny_model_path(), tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | code))
    with pytest.raises(ConfigError, match="tokenizer_path=.*in tokenizer_config.json"):
        prepare("gsm8k_grpo", ["hardware=cpu", f"tokenizer_path={tmp_path}/tokenizer"])
    with pytest.raises(ConfigError, match="embedded|local never runs code"):
        check("trust_remote_code=true")


STATES = "layers that carry a state from token to token, and AReaL packs sequences"


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "mamba2"])
def test_areals_own_engine_carries_states_from_sequence_to_sequence(
    name: str, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_path(), tmp_path / "model")
    tiny_model(name, vocab_size=512).save_pretrained(tmp_path / "model")

    def found(backend: str, path: Path) -> list[str]:
        run, *_ = load(f"actor.path={path}", f"actor.backend={backend}")
        notes = check_model(run.actor, trust_remote_code=False)
        return [note for note in notes if STATES in note]

    model = tmp_path / "model"
    (note,) = found("areal-fsdp:d1", model)
    assert note.startswith(f"actor.backend=areal-fsdp:d1: {name} has layers that")
    assert "Use actor.backend=dta:dN or fsdp:dN" in note
    for backend, path in (
        ("dta:d1", model),
        ("fsdp:d1", model),
        ("areal-fsdp:d1", tiny_model_path()),
    ):
        assert found(backend, path) == []


def test_a_model_that_trees_cannot_split_is_refused(tmp_path: Path) -> None:
    path = model_with(tmp_path / "model", attention_dropout=0.1)
    with pytest.raises(ConfigError, match="has dropout: attention_dropout=0.1"):
        check(f"actor.path={path}", "actor.disable_dropout=false")
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    one_layer = model_with(tmp_path / "one", **one)
    with pytest.raises(ConfigError, match="needs two layers or more"):
        check(f"actor.path={one_layer}", "actor.dta.reshard=block")


def test_a_tokenizer_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="tokenizer_path=.* cannot be l") as error:
        prepare("gsm8k_grpo", ["hardware=cpu", f"tokenizer_path={tmp_path}/empty"])
    assert "\n" not in str(error.value)


def test_slurm_needs_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "which", lambda command: None)
    with pytest.raises(ConfigError, match="has no sbatch, squeue, scancel"):
        check("scheduler.type=slurm")
