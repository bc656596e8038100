"""The main job through the real launcher, small: everything is real but the sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.running import SMALL_RUN, RunningLaunch, run_launcher
from tests.report.test_report import REQUIRED_KEYS

GSM8K = Path(__file__).parents[2] / "../shared/data/gsm8k/train.jsonl"


@pytest.mark.timeout(400)
def test_three_steps_of_the_main_job(tmp_path: Path) -> None:
    with RunningLaunch(tmp_path, "total_train_steps=3") as run:
        assert run.wait(timeout_seconds=360) == 0, run.text()
        assert run.processes() == []

    records = run.metrics()
    assert [r["step"] for r in records] == [1, 2, 3]
    for record in records:
        assert list(record)[: len(REQUIRED_KEYS)] == REQUIRED_KEYS
        assert all(record[key] is not None for key in REQUIRED_KEYS)
        assert 0.0 <= record["reward"] <= 1.0
        assert record["num_sequences"] == 16
        assert record["sequence_tokens"] > record["tree_tokens"] > 0
        assert record["sharing_ratio"] == pytest.approx(
            record["sequence_tokens"] / record["tree_tokens"]
        )
        parts = ("rollout_seconds", "train_seconds", "update_seconds")
        assert record["step_seconds"] >= sum(record[part] for part in parts)
    assert (run.run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")

    text = run.text()
    assert "hardware=auto: " in text
    assert "step 3/3  reward" in text
    assert "of a step beside it" in text  # what collecting costs
    assert "on purpose, faulty habits" in " ".join(text.split())  # what a rise means
    (checkpoint,) = (
        Path(line.split()[1])
        for line in text.splitlines()
        if line.startswith("checkpoint ")
    )
    assert (checkpoint / "config.json").is_file()
    assert list(checkpoint.glob("*.safetensors"))
    saved = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    assert saved["total_train_steps"] == 3
    assert saved["actor"]["backend"] == "dta:d1"
    assert "Traceback" not in (run.run_dir / "launch.log").read_text()


def small_run(tmp_path: Path, *overrides: str) -> list[dict[str, float]]:
    result = run_launcher(
        *("--config", "gsm8k_grpo.yaml", *SMALL_RUN, "total_train_steps=3", *overrides),
        cwd=tmp_path,
        timeout_seconds=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    path = tmp_path / "outputs" / "gsm8k-grpo" / "trial0" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("backend", ["dta:d2", "fsdp:d1", "fsdp:d2", "areal-fsdp:d1"])
def test_other_training_backends(tmp_path: Path, backend: str) -> None:
    records = small_run(tmp_path, f"actor.backend={backend}")
    assert [r["step"] for r in records] == [1, 2, 3]
    assert all(r["tree_tokens"] < r["sequence_tokens"] for r in records)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_two_rollout_servers(tmp_path: Path) -> None:
    assert len(small_run(tmp_path, "rollout.backend=local:d2")) == 3


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_ray(tmp_path: Path) -> None:
    with RunningLaunch(tmp_path, "scheduler=ray", "total_train_steps=3") as run:
        assert run.wait(timeout_seconds=400) == 0, run.text()
        assert run.processes() == []
    assert len(run.metrics()) == 3


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_real_gsm8k(tmp_path: Path) -> None:
    if not GSM8K.is_file():
        pytest.skip(f"{GSM8K.resolve()} is not there")
    records = small_run(
        tmp_path,
        f"train_dataset.path={GSM8K.resolve()}",
        "train_dataset.max_length=512",
    )
    assert len(records) == 3
    assert all(0.0 <= r["reward"] <= 1.0 for r in records)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_evaluation_and_areals_own_logging(tmp_path: Path) -> None:
    small_run(
        tmp_path,
        "+valid_dataset={path: embedded, type: rl, split: test, batch_size: 4, "
        "dataset_kwargs: {num_problems: 8}}",
        "evaluator.freq_steps=1",
        f"stats_logger.tensorboard.path={tmp_path}/tb",
        "stats_logger.wandb.mode=offline",
        "rollout.agent.admin_api_key=PROXY-SENTINEL",
        "stats_logger.wandb.notes='https://me:URL-SENTINEL@host'",
    )
    assert list((tmp_path / "tb").glob("events.*"))
    assert list(tmp_path.rglob("*.wandb"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [p for p in files if b"PROXY-SENTINEL" in p.read_bytes()]
    config = tmp_path / "outputs" / "gsm8k-grpo" / "trial0" / "config.yaml"
    assert "URL-SENTINEL" not in config.read_text()


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("config", ["gsm8k_grpo.yaml", "gsm8k_calculator.yaml"])
def test_nothing_of_ours_can_be_reached_from_the_network(
    tmp_path: Path, config: str
) -> None:
    with RunningLaunch(tmp_path, config=config) as run:
        run.wait_for_step(1)
        listening = [
            (c.laddr.ip, c.laddr.port)
            for process in run.processes()
            for c in process.net_connections(kind="inet")
            if c.status == "LISTEN"
        ]
        # PyTorch's key-value stores bind to all interfaces and cannot be told not to:
        # one of the trainer's workers, one of the controller's own group.
        reachable = {(ip, port) for ip, port in listening if ip != "127.0.0.1"}
        assert len(reachable) <= 2
        assert len(listening) > len(reachable)
