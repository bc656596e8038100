"""Trainers by AReaL's names: what they refuse before anything starts, and imports."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import areal
import pytest
from areal.api import cli_args
from areal.api.cli_args import load_expr_config

import areal_dta
from areal_dta.config.composed import ConfigError
from areal_dta.processes.reaper import MARKER, marked_processes
from areal_dta.processes.run_lock import children_end_with_run, locked
from areal_dta.startup.compose import project_config_dir

ROWS = [{"messages": [], "answer": "1"}] * 64
GRPO = ["--config", str(project_config_dir() / "gsm8k_grpo.yaml"), "hardware=cpu"]


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("algorithm", ["PPO", "SFT", "DPO", "RW"])
def test_names_are_areal_s(algorithm: str) -> None:
    trainer = getattr(areal_dta, f"{algorithm}Trainer")
    assert issubclass(trainer, getattr(areal, f"{algorithm}Trainer"))
    config = getattr(areal_dta, f"{algorithm}Config")
    assert issubclass(config, getattr(cli_args, f"{algorithm}Config"))
    assert issubclass(areal_dta.GRPOConfig, cli_args.GRPOConfig)


def test_importing_the_package_stays_light() -> None:
    code = "import sys, areal_dta; print(areal_dta.__version__, *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "areal", "numpy"} & set(done.stdout.split())


def test_load_expr_config_takes_our_options_and_backends() -> None:
    overrides = ["actor.backend=dta:d2", "+actor.dta.block_tokens=256"]
    config, _ = load_expr_config([*GRPO, *overrides], areal_dta.GRPOConfig)
    assert config.actor.backend == "dta:d2"
    assert config.actor.dta.block_tokens == 256


def test_a_config_class_of_areal_is_refused_by_name() -> None:
    config = cli_args.GRPOConfig.__new__(cli_args.GRPOConfig)
    with pytest.raises(ConfigError, match="from areal_dta import GRPOConfig"):
        areal_dta.PPOTrainer(config, train_dataset=ROWS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.backend=dta:t2"], "data parallel only"),
        (["actor.kl_ctl=0.1"], "needs a reference"),
        (["train_dataset.batch_size=128"], "fewer than one batch"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    cwd: Path, overrides: list[str], message: str
) -> None:
    @dataclass
    class OwnConfig(areal_dta.GRPOConfig):
        my_option: int = 3

    config, _ = load_expr_config([*GRPO, *overrides], OwnConfig)
    with pytest.raises(ConfigError, match=message):
        areal_dta.PPOTrainer(config, train_dataset=ROWS)
    assert not (cwd / "outputs" / "gsm8k-grpo").exists()


def test_two_runs_in_one_directory(cwd: Path) -> None:
    config, _ = load_expr_config(GRPO, areal_dta.GRPOConfig)
    with locked(cwd / "outputs" / "gsm8k-grpo" / "trial0"):
        with pytest.raises(ConfigError, match="another run is using"):
            areal_dta.PPOTrainer(config, train_dataset=ROWS)


def test_children_end_with_the_run(cwd: Path) -> None:
    before = os.environ.get(MARKER)
    with children_end_with_run(cwd) as marker:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
        assert os.environ[MARKER] == marker
    assert child.wait(timeout=10) == -9
    assert marked_processes(marker) == []
    assert os.environ.get(MARKER) == before
