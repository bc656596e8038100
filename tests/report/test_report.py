"""metrics.jsonl, the meter of batches, the alerts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_dta.collector.collector import Collector
from areal_dta.collector.planned_batch import PlannedBatch
from areal_dta.report.batch_sharing import BatchMeter
from areal_dta.report.log_alerts import AlertReader
from areal_dta.report.step_metrics import (
    MetricsWriter,
    StepMetrics,
    read_metrics,
    step_metrics,
)
from areal_dta.schedule import FlopModel
from tests.engine.dispatch_scenarios import make_items

REQUIRED_KEYS = [
    "step",
    "reward",
    "loss",
    "grad_norm",
    "sequence_tokens",
    "tree_tokens",
    "sharing_ratio",
    "rollout_seconds",
    "train_seconds",
    "step_seconds",
]


def make_step(step: int = 1, reward: float | None = 0.5) -> StepMetrics:
    return StepMetrics(
        step=step,
        reward=reward,
        loss=-0.0123,
        grad_norm=0.25,
        sequence_tokens=9600,
        tree_tokens=1600,
        sharing_ratio=6.0,
        rollout_seconds=1.0,
        train_seconds=0.5,
        step_seconds=1.75,
        update_seconds=0.2,
        predicted_saving=0.8,
        num_sequences=128,
    )


class TestMetrics:
    def test_one_line_a_step_on_disk_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "run" / "metrics.jsonl"
        writer = MetricsWriter(path)
        for step in (1, 2):
            writer.write(make_step(step))
            lines = path.read_text().splitlines()  # before it is closed
            assert len(lines) == step
        record = json.loads(lines[-1])
        assert list(record)[: len(REQUIRED_KEYS)] == REQUIRED_KEYS
        assert record["tree_tokens"] == 1600
        writer.close()
        assert read_metrics(path) == [make_step(1), make_step(2)]

    def test_not_finite_is_null(self, tmp_path: Path) -> None:
        writer = MetricsWriter(tmp_path / "m.jsonl")
        writer.write(make_step(reward=math.nan))
        assert json.loads((tmp_path / "m.jsonl").read_text())["reward"] is None

    def test_an_older_run_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        for reward in (0.1, 0.2, 0.3):
            writer = MetricsWriter(path)
            writer.write(make_step(reward=reward))
            writer.close()
        kept = [tmp_path / "metrics.1.jsonl", tmp_path / "metrics.2.jsonl", path]
        assert [read_metrics(p)[0].reward for p in kept] == [0.1, 0.2, 0.3]

    def test_a_run_that_continues_has_each_step_once(self, tmp_path: Path) -> None:
        """Steps after the recovered one are done again: their lines are put aside."""
        path = tmp_path / "metrics.jsonl"
        writer = MetricsWriter(path)
        for step in (1, 2, 3):
            writer.write(make_step(step, reward=0.1))
        writer.close()
        with open(path, "a") as file:
            file.write('{"step": 4, "rew')
        before = path.read_text()
        writer = MetricsWriter(path, num_steps_done=2)
        for step in (3, 4):
            writer.write(make_step(step, reward=0.2))
        writer.close()
        found = [(m.step, m.reward) for m in read_metrics(path)]
        assert found == [(1, 0.1), (2, 0.1), (3, 0.2), (4, 0.2)]
        assert (tmp_path / "metrics.1.jsonl").read_text() == before
        MetricsWriter(path, num_steps_done=4).close()  # nothing to put aside
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "metrics.1.jsonl",
            "metrics.jsonl",
        ]

    def test_a_line_that_two_runs_wrote_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": 2, "rew{"step": 2}\n')
        MetricsWriter(path, num_steps_done=2).close()
        assert path.read_text() == '{"step": 1}\n'

    def test_a_line_cut_short_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        writer = MetricsWriter(path)
        writer.write(make_step())
        with open(path, "a") as file:
            file.write('{"step": 2, "rew')
        assert [m.step for m in read_metrics(path)] == [1]

    def test_from_areals_statistics(self) -> None:
        stats = {
            "ppo_actor/task_reward/avg": 0.5,
            "ppo_actor/update/actor_loss/avg": 0.01,
            "ppo_actor/update/grad_norm": math.inf,
            "timeperf/rollout": 1.0,
            "timeperf/recompute_logp": 0.25,
            "timeperf/compute_advantage": 0.5,
            "timeperf/train_step": 2.0,
            "timeperf/update_weights": 0.125,
        }
        metrics = step_metrics(3, stats, None, 4.0)
        assert metrics.step == 3
        assert metrics.reward == 0.5
        assert metrics.loss == 0.01
        assert metrics.grad_norm is None
        assert metrics.rollout_seconds == 1.0
        assert metrics.train_seconds == 2.75
        assert metrics.update_seconds == 0.125
        assert metrics.step_seconds == 4.0
        assert metrics.sequence_tokens is None

    @pytest.mark.parametrize(
        ("algorithm", "accuracy"),
        [("sft", None), ("dpo", "reward_accuracy"), ("rw", "correct_ratio")],
    )
    def test_from_areals_statistics_without_rollouts(
        self, algorithm: str, accuracy: str | None
    ) -> None:
        stats = {
            f"{algorithm}/loss/avg": 0.5,
            f"{algorithm}/grad_norm": 2.0,
            f"{algorithm}-eval/loss/avg": 9.0,
            f"{algorithm}/{accuracy}/avg": 0.75,
            "timeperf/ref_logp": 0.5,
            "timeperf/train_step": 1.0,
        }
        metrics = step_metrics(1, stats, None, 2.0)
        assert (metrics.loss, metrics.grad_norm) == (0.5, 2.0)
        assert metrics.accuracy == (None if accuracy is None else 0.75)
        assert metrics.train_seconds == 1.5
        assert metrics.reward is metrics.rollout_seconds is metrics.value_loss is None

    def test_what_a_critic_and_a_reference_cost(self) -> None:
        stats = {
            "ppo_critic/critic_loss/avg": 0.25,
            "timeperf/critic_values": 1.0,
            "timeperf/ref_logp": 2.0,
            "timeperf/teacher_logp": 4.0,
            "timeperf/train_step": 8.0,
            "timeperf/critic_train_step": 16.0,
        }
        metrics = step_metrics(1, stats, None, 40.0)
        assert metrics.value_loss == 0.25
        assert metrics.train_seconds == 31.0
        assert metrics.logprob_seconds == 7.0

    def test_where_the_trainer_waited(self) -> None:
        stats = {"wait/rollout": 2.0, "wait/plan": 0.5, "waits": 1.0}
        metrics = step_metrics(1, stats, None, 4.0)
        assert metrics.wait == {"wait/rollout": 2.0, "wait/plan": 0.5}
        assert StepMetrics.from_record(metrics.to_record()) == metrics


class TestMeter:
    def test_a_reward_model_reads_the_last_value_alone(self) -> None:
        """The model's FLOPs are its tokens, and 10 for each output."""
        flops = FlopModel(per_token=1.0, per_pair=0.0, per_output=10.0)
        batch = [
            {
                "input_ids": torch.tensor([ids]),
                "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
            }
            for ids in ([1, 2, 3, 4], [1, 2, 3, 5])
        ]
        shape = BatchMeter(flops, 512, None, is_reward_model=True).measure(batch)
        assert (shape.num_sequences, shape.tree_tokens, shape.reward) == (2, 5, None)
        # dense: 8 tokens and 8 outputs; tree: 5 tokens and 2 outputs
        assert shape.predicted_saving == pytest.approx(1 - (5 + 20) / (8 + 80))

    def test_the_loss_mask_says_what_a_policy_reads(self) -> None:
        flops = FlopModel(per_token=1.0, per_pair=0.0, per_output=10.0)
        item = {
            "input_ids": torch.tensor([[1, 2, 3, 4]]),
            "attention_mask": torch.ones(1, 4, dtype=torch.bool),
            "loss_mask": torch.tensor([[0, 0, 1, 0]]),
        }
        shape = BatchMeter(flops, 512, None).measure([item])
        # The output before the third token, for which the first two are computed.
        assert shape.predicted_saving == pytest.approx(1 - (2 + 10) / (4 + 40))

    @pytest.mark.parametrize("seed", range(20))
    @pytest.mark.parametrize("retain", [None, 3])
    def test_a_collected_batch_needs_no_tensors(self, seed: int, retain: int) -> None:
        """0.1.0 fetched ids and masks again and built the tree: seconds per step."""
        rng = np.random.default_rng(seed)
        items = make_items(rng.integers(1, 6, 6).tolist(), seed)
        for item in items:  # not only at the end of a sequence
            random = torch.from_numpy(rng.integers(0, 2, item["loss_mask"].shape))
            item["loss_mask"] = random.int() * item["attention_mask"]
            item["loss_mask"][0, 1] = 1
        collector = Collector()
        for task_id, item in enumerate(items):
            collector.offer(task_id, item, 0)
        flops = FlopModel(per_token=7.0, per_pair=0.5, per_output=30.0)
        meter = BatchMeter(flops, 4, retain)
        batch = PlannedBatch([{}] * 6, collector.take(range(6)))
        found, expected = meter.measure(batch), meter.measure(items)
        assert found.predicted_saving == pytest.approx(expected.predicted_saving)
        assert found.reward == pytest.approx(expected.reward)
        for name in ("num_sequences", "sequence_tokens", "tree_tokens"):
            assert getattr(found, name) == getattr(expected, name)
        assert found.sharing_ratio == pytest.approx(expected.sharing_ratio)


class TestAlerts:
    LINE = "\x1b[33m(AReaL)\x1b[0m \x1b[33m20260101-10:00:00.123 {}: {}\x1b[0m\n"

    def reader(self, path: Path) -> AlertReader:
        path.write_text("")
        return AlertReader(path)

    def write(self, path: Path, *lines: str) -> None:
        with open(path, "a") as file:
            file.writelines(lines)

    def test_warnings_and_errors_once(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        reader = self.reader(path)
        self.write(
            path,
            self.LINE.format("StatsLogger INFO", "fine"),
            self.LINE.format("FSDPEngine Rank 0 WARNING", "grad norm 12.5"),
            self.LINE.format("FSDPEngine Rank 0 WARNING", "grad norm 13.5"),
            self.LINE.format("Guard ERROR", "no"),
            "WARNING: not AReaL's\n",
        )
        alerts = reader.read_new()
        assert [(a.level, a.text) for a in alerts] == [
            ("WARNING", "FSDPEngine Rank 0: grad norm 12.5"),
            ("ERROR", "Guard: no"),
        ]
        assert [a.is_error for a in alerts] == [False, True]
        assert reader.read_new() == []

    def test_a_line_that_arrives_in_two_parts(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        reader = self.reader(path)
        line = self.LINE.format("Guard ERROR", "no")
        self.write(path, line[:30])
        assert reader.read_new() == []
        self.write(path, line[30:])
        assert [a.text for a in reader.read_new()] == ["Guard: no"]

    def test_known_noise_and_floods_are_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        reader = self.reader(path)
        noise = "fileroot '/x' is not on a network filesystem. This may"
        words = [chr(97 + i // 26) + chr(97 + i % 26) for i in range(100)]
        self.write(
            path,
            self.LINE.format("FS WARNING", noise),
            *(self.LINE.format("X WARNING", word) for word in words),
        )
        alerts = reader.read_new()
        assert len(alerts) == 21
        assert alerts[-1].text == "more warnings follow in the log"
