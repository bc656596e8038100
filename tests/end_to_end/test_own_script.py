"""A script in AReaL's style, as a user writes it, trains on the tree engine.

The examples are run as they are; the data, the workflow and the reward are theirs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.end_to_end.running import REPOSITORY, launch_env

GRPO = ("train_grpo", "configs/gsm8k_grpo.yaml", "hardware=cpu")
GRPO += ("gconfig.n_samples=4", "gconfig.max_new_tokens=16")
SMALL = ("train_dataset.batch_size=4", "+launch.startup_timeout_seconds=300")


class Script:
    """One of the examples, running in the background."""

    def __init__(self, cwd: Path, name: str, config: str, *overrides: str) -> None:
        path = REPOSITORY / config
        self.output = cwd / f"{name}.out"
        with open(self.output, "w") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, str(REPOSITORY / "examples" / f"{name}.py")),
                    *("--config", str(path), *SMALL, *overrides),
                ],
                cwd=cwd,
                env=launch_env(),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        experiment = yaml.safe_load(path.read_text())["experiment_name"]
        self.run_dir = cwd / "outputs" / experiment / "trial0"

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in [*self.started(), self.process]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass

    def started(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def find(self, *words: str) -> psutil.Process:
        found = [p for p in self.started() if all(w in p.cmdline() for w in words)]
        return max(found, key=lambda p: p.create_time())  # below the shell that logs it

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def wait_for_step(self, step: int, timeout_seconds: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while len(self.metrics()) < step:
            assert self.process.poll() is None, self.output.read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_three_steps_of_an_own_script(tmp_path: Path) -> None:
    with Script(tmp_path, *GRPO, "total_train_steps=3") as script:
        started: set[psutil.Process] = set()
        while script.process.poll() is None:
            started |= set(script.started())
            time.sleep(0.5)
        text = script.output.read_text()
        assert script.process.returncode == 0, text[-4000:]

    records = script.metrics()
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert 0.0 <= record["reward"] <= 1.0
        assert record["sharing_ratio"] > 1.0
        assert record["collector"]["plan/imbalance"] >= 1.0  # collected and planned
    saved = yaml.safe_load((script.run_dir / "config.yaml").read_text())
    assert saved["actor"]["backend"] == "dta:d1"
    for name in ("reward", "tokens", "seconds"):
        assert (script.run_dir / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in text
    assert len(started) >= 3  # a trainer, a rollout worker, a server
    assert not psutil.wait_procs(list(started), timeout=10)[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_supervised_fine_tuning_by_an_own_script(tmp_path: Path) -> None:
    steps = "total_train_steps=3"
    with Script(tmp_path, "train_sft", "examples/sft.yaml", steps) as script:
        assert script.process.wait(timeout=600) == 0, script.output.read_text()[-4000:]
    assert [record["step"] for record in script.metrics()] == [1, 2, 3]
    assert all(record["loss"] > 0 for record in script.metrics())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_silent_server_ends_the_script(tmp_path: Path, number: int) -> None:
    limit = "+launch.step_timeout_seconds=60"
    with Script(tmp_path, *GRPO, limit) as script:
        script.wait_for_step(1)
        started = script.started()
        script.find("areal_dta.rollout_server.server").send_signal(number)
        assert script.process.wait(timeout=180) == 1
        expected = "has died" if number == signal.SIGKILL else "no progress"
        lines = script.output.read_text().splitlines()
        # behind PyTorch's mark of the rank
        assert [x for x in lines if "RuntimeError: " in x and expected in x]
        assert not psutil.wait_procs(started, timeout=10)[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_of_the_script_leaves_nothing(tmp_path: Path) -> None:
    with Script(tmp_path, *GRPO, "recover.mode=on") as script:
        script.wait_for_step(2)
        started = script.started()
        os.kill(script.process.pid, signal.SIGKILL)
        assert not psutil.wait_procs(started, timeout=15)[1]
    # The same command continues the run, which has a step less to do.
    continued = ("recover.mode=on", "total_train_steps=4")
    with Script(tmp_path, *GRPO, *continued) as script:
        assert script.process.wait(timeout=600) == 0
        assert [record["step"] for record in script.metrics()] == [1, 2, 3, 4]
