"""The jobs of all algorithms through the real launcher, small but for their sizes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running import RunningLaunch, run_launcher, small_run

TEACHER = (
    "+teacher={engine_type: train, distill_loss_weight: 0.1, train: {backend: 'dta:d1',"
    " experiment_name: '${experiment_name}', trial_name: '${trial_name}', path: "
    "'${actor.path}', dtype: float32, attn_impl: sdpa, disable_dropout: true, "
    "gradient_checkpointing: false, optimizer: null, mb_spec: {max_tokens_per_mb: 8192}"
    ", scheduling_spec: '${actor.scheduling_spec}'}}"
)


def launched(tmp_path: Path, config: str, *overrides: str) -> list[dict[str, Any]]:
    """The records of a run that has to succeed."""
    result = run_launcher(
        *("--config", config, *overrides), cwd=tmp_path, timeout_seconds=420
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = tmp_path.glob("outputs/*/trial0/metrics.jsonl")
    assert "Traceback" not in (path.parent / "launch.log").read_text()
    assert "\ncheckpoint " in result.stdout
    return [json.loads(line) for line in path.read_text().splitlines()]


def small(tmp_path: Path, config: str, *overrides: str) -> list[dict[str, Any]]:
    steps = "total_train_steps=3"
    records = launched(tmp_path, config, *small_run(config), steps, *overrides)
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["tree_tokens"] < record["sequence_tokens"]
        assert record["grad_norm"] > 0
    return records


@pytest.mark.timeout(400)
def test_three_steps_of_supervised_fine_tuning(tmp_path: Path) -> None:
    with RunningLaunch(tmp_path, "total_train_steps=3", config="gsm8k_sft.yaml") as run:
        assert run.wait(timeout_seconds=360) == 0, run.text()
        assert run.processes() == []
    for record in run.metrics():
        assert record["reward"] is record["rollout_seconds"] is None
        assert record["loss"] > 0 and record["grad_norm"] > 0
        assert record["num_sequences"] == 4
        assert record["sequence_tokens"] > record["tree_tokens"] > 0
        assert record["step_seconds"] >= record["train_seconds"] > 0
    text = run.text()
    assert "step 3/3  loss +" in text and "reward" not in text
    assert (run.run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (run.run_dir / "reward.png").exists()


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("config", "most", "steps"),
    [("gsm8k_sft", 0.5, 40), ("gsm8k_dpo", 0.93, 40), ("gsm8k_rw", 0.93, 60)],
)
def test_the_loss_falls(tmp_path: Path, config: str, most: float, steps: int) -> None:
    """Shipped jobs. DPO and reward models start at log 2, and their pairs are hard."""
    records = launched(tmp_path, f"{config}.yaml")
    losses = [record["loss"] for record in records]
    assert len(losses) == steps
    assert sum(losses[-10:]) / 10 < most * sum(losses[:5]) / 5


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_rewards_rise_with_a_critic_and_a_reference(tmp_path: Path) -> None:
    records = launched(tmp_path, "gsm8k_ppo.yaml")
    rewards = [record["reward"] for record in records]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.2
    value_losses = [record["value_loss"] for record in records]
    assert sum(value_losses[-10:]) < sum(value_losses[:10])


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("backend", ["dta:d2", "fsdp:d1", "fsdp:d2"])
@pytest.mark.parametrize("config", ["gsm8k_sft", "gsm8k_dpo", "gsm8k_rw"])
def test_other_backends(tmp_path: Path, config: str, backend: str) -> None:
    records = small(tmp_path, f"{config}.yaml", f"actor.backend={backend}")
    if config != "gsm8k_sft":
        assert all(0.0 <= record["accuracy"] <= 1.0 for record in records)
        assert records[0]["num_sequences"] == 8  # pairs


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("backend", ["dta:d1", "fsdp:d1"])
def test_ppo(tmp_path: Path, backend: str) -> None:
    models = ("actor", "critic", "ref")
    overrides = [f"{model}.backend={backend}" for model in models]
    records = small(tmp_path, "gsm8k_ppo.yaml", *overrides)
    assert all(record["value_loss"] > 0 for record in records)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_teacher_on_the_tree_engine(tmp_path: Path) -> None:
    small(tmp_path, "gsm8k_grpo.yaml", TEACHER)
    (log,) = tmp_path.glob("outputs/*/trial0/launch.log")
    assert "ppo_actor/update/rkl_loss/avg" in log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "rw"])
def test_evaluation(tmp_path: Path, algorithm: str) -> None:
    small(
        tmp_path,
        f"gsm8k_{algorithm}.yaml",
        "+valid_dataset={path: embedded, type: '${train_dataset.type}', split: test, "
        "batch_size: 3, dataset_kwargs: {num_problems: 7}}",
        "evaluator.freq_steps=1",
    )
    (log,) = tmp_path.glob("outputs/*/trial0/launch.log")
    assert f"{algorithm}-eval/loss/avg" in log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_ctrl_c_during_supervised_fine_tuning(tmp_path: Path) -> None:
    with RunningLaunch(tmp_path, config="gsm8k_sft.yaml") as run:
        run.wait_for_step(2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.processes() == []
        assert (run.run_dir / "loss.png").exists()
