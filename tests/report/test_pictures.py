"""The pictures of a run."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

from areal_dta.report.plot import (
    draw_run,
    plot_curve,
    plot_seconds,
    plot_tokens,
    running_mean,
)
from areal_dta.report.step_metrics import MetricsWriter, StepMetrics, step_metrics
from tests.report.test_report import make_step


class TestPlot:
    def test_running_mean(self) -> None:
        assert running_mean([1.0, 2.0, 3.0, 4.0], window=2) == [1.0, 1.5, 2.5, 3.5]
        assert running_mean([]) == []

    def test_png(self, tmp_path: Path) -> None:
        steps = [make_step(s, reward=s / 10) for s in range(1, 6)]
        path = tmp_path / "reward.png"
        assert plot_curve(steps, path, "reward", "title", "A note. " * 40)
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_losses(self, tmp_path: Path) -> None:
        steps = [make_step(s, reward=None) for s in range(1, 6)]
        path = tmp_path / "loss.png"
        assert plot_curve(steps, path, "loss", "title")
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_no_reward_no_file(self, tmp_path: Path) -> None:
        assert not plot_curve([make_step(reward=None)], tmp_path / "x.png", "reward")
        assert list(tmp_path.iterdir()) == []


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def write_run(directory: Path, steps: list[StepMetrics]) -> Path:
    writer = MetricsWriter(directory / "metrics.jsonl")
    for step in steps:
        writer.write(step)
    return directory


class TestRun:
    WAIT = {"wait/rollout": 0.5, "wait/workers": 0.75}

    def test_all_pictures_of_a_policy(self, tmp_path: Path) -> None:
        steps = [
            dataclasses.replace(
                make_step(s, reward=s / 10),
                wait=self.WAIT,
                eval_reward=s / 20 if s % 2 else None,
            )
            for s in range(1, 6)
        ]
        drawn = draw_run(write_run(tmp_path / "run", steps), "A note.")
        assert [path.name for _, path in drawn] == [
            *("reward.png", "tokens.png", "seconds.png", "waits.png")
        ]
        assert all(size_of(path)[0] == 910 for _, path in drawn)

    def test_losses_without_rollouts(self, tmp_path: Path) -> None:
        step = dataclasses.replace(make_step(reward=None), rollout_seconds=None)
        drawn = draw_run(write_run(tmp_path / "run", [step]))
        assert [name for name, _ in drawn] == ["loss curve", "tokens", "seconds"]

    def test_a_run_without_steps(self, tmp_path: Path) -> None:
        assert draw_run(tmp_path) == []
        assert draw_run(write_run(tmp_path / "run", [])) == []

    def test_no_values_no_file(self, tmp_path: Path) -> None:
        step = dataclasses.replace(
            make_step(), sequence_tokens=None, tree_tokens=None, train_seconds=None
        )
        assert not plot_tokens([step], tmp_path / "tokens.png")
        assert not plot_seconds([step], tmp_path / "seconds.png")
        assert list(tmp_path.iterdir()) == []


def test_the_evaluation_set_has_its_reward() -> None:
    stats = {"rollout/reward": 0.75, "eval-rollout/reward": 0.5}
    assert step_metrics(1, stats, None, 1.0).eval_reward == 0.5
    assert step_metrics(1, {"rollout/reward": 0.75}, None, 1.0).eval_reward is None
