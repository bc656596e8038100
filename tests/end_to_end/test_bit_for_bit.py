"""A run that was killed and started again ends as one that was not, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running import ROLLOUT_CONFIGS, RunningLaunch

STEPS, KILLED_AFTER = 6, 2
OPTIONS = (
    "recover.mode=on",
    f"total_train_steps={STEPS}",
    "actor.optimizer.lr_scheduler_type=linear",
    "actor.optimizer.warmup_steps_proportion=0.5",
    "actor.dta.block_tokens=512",
    "actor.dta.retain_tokens=100000",
)
SYNCHRONOUS = (
    "rollout.max_head_offpolicyness=0",
    "local.max_batch_size=1",
    "local.num_threads=1",
    "collector.refit_costs=false",
)
TIMINGS = ("_seconds", "share_of_step")
"""Ends of the keys that tell how long something took."""
ADDRESSES = ("collector/dispatched_bytes",)
"""Also the length of port numbers."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "config, options",
    [
        ("gsm8k_grpo.yaml", ("actor.backend=dta:d1",)),
        ("gsm8k_grpo.yaml", ("actor.backend=dta:d2",)),
        ("gsm8k_ppo.yaml", ("critic.optimizer.lr_scheduler_type=linear",)),
        ("gsm8k_sft.yaml", ()),
        ("gsm8k_dpo.yaml", ()),
        ("gsm8k_rw.yaml", ()),
    ],
    ids=["grpo-d1", "grpo-d2", "ppo-d1", "sft", "dpo", "rw"],
)
def test_killed_and_continued(
    tmp_path: Path, config: str, options: tuple[str, ...]
) -> None:
    if config in ROLLOUT_CONFIGS:
        options += SYNCHRONOUS
    expected = run_to_end(tmp_path / "whole", config, *OPTIONS, *options)

    cut = tmp_path / "cut"
    cut.mkdir()
    with RunningLaunch(cut, *OPTIONS, *options, config=config) as run:
        run.wait_for_step(KILLED_AFTER)
        run.find("areal_dta.startup.train_process").kill()
        assert run.wait(timeout_seconds=120) == 1, run.text()
        run.wait_until_empty()
        assert "resume        python -m areal_dta.launch --config" in run.text()
    found = run_to_end(cut, config, *OPTIONS, *options)

    text = (cut / "launcher.out").read_text()
    (step,) = re.findall(r"continuing after step (\d+)", text)
    assert KILLED_AFTER <= int(step) < STEPS
    assert [record["step"] for record in found[0]] == list(range(1, STEPS + 1))
    assert without_timings(found[0]) == without_timings(expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, content in expected[1].items():
        assert found[1][name] == content, name


def run_to_end(
    cwd: Path, config: str, *overrides: str
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return the metrics of a run, and the weights of its models at its end."""
    cwd.mkdir(exist_ok=True)
    with RunningLaunch(cwd, *overrides, config=config) as run:
        assert run.wait(timeout_seconds=400) == 0, run.text()
        assert "should not be a resumed" not in (run.run_dir / "launch.log").read_text()
        metrics = run.metrics()
    pattern = f"*globalstep{STEPS - 1}/*.safetensors"
    weights = {
        f"{path.parents[1].name}/{path.name}": path.read_bytes()
        for path in cwd.rglob(pattern)
    }
    assert weights
    return metrics, weights


def without_timings(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all values that do not depend on how fast the machine was."""

    def kept(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: kept(value) if isinstance(value, dict) else value
            for key, value in values.items()
            if not key.endswith(TIMINGS) or key == "plan/predicted_seconds"
            if key not in ADDRESSES
        }

    return [kept(record) for record in records]
