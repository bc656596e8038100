"""The live table on terminals of any width, and plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import fields

import pytest
from rich.console import Console

from areal_dta.config.schema import ALGORITHMS
from areal_dta.report.live_table import COLUMNS, SHOWN_STEPS, RunView, brief
from areal_dta.report.step_metrics import StepMetrics, step_metrics
from tests.report.test_report import make_step


class TestView:
    def view(self, terminal: bool) -> tuple[RunView, io.StringIO]:
        out = io.StringIO()
        console = Console(
            file=out, force_terminal=terminal, width=140, color_system=None
        )
        return RunView(console, clock=lambda: 0.0), out

    def test_plain_lines_where_there_is_no_terminal(self) -> None:
        view, out = self.view(terminal=False)
        with view:
            view.status("training")
            view.set_run(50)
            view.step(make_step(7))
            view.message("[/not markup]")
        lines = out.getvalue().splitlines()
        assert lines[0] == "[0 s] training"
        assert lines[1] == (
            "step 7/50  reward 0.500  loss -0.0123  grad_norm 0.250  "
            "sequence_tokens 9,600  tree_tokens 1,600  sharing 6.00  saving_% 80  "
            "not_trained -  prefix_hits_% -  rollout_s 1.00  too_old_s -  "
            "train_s 0.50  update_s 0.20  step_s 1.75"
        )
        assert lines[2] == "[/not markup]"

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_columns_follow_the_algorithm(self, algorithm: str) -> None:
        view, out = self.view(terminal=False)
        with view:
            view.set_run(50, algorithm)
            view.step(dataclasses.replace(make_step(), accuracy=0.875))
        line = out.getvalue()
        assert ("reward 0.500" in line) is (algorithm == "ppo")
        assert ("accuracy 0.875" in line) is (algorithm in ("dpo", "rw"))
        assert "loss -0.0123" in line and "sharing 6.00" in line

    @pytest.mark.parametrize("width", [200, 80, 60, 40])
    def test_the_table_never_wraps_or_cuts(self, width: int) -> None:
        """Large values in all columns, the alarm's included; 80 holds all of them."""
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=width, color_system=None)
        view = RunView(console, clock=lambda: 0.0)
        view.set_run(1000)
        step = dataclasses.replace(
            make_step(999),
            loss=-0.1234,
            grad_norm=123.4,
            sequence_tokens=1_371_428,
            tree_tokens=228_571,
            sharing_ratio=58.31,
            rollout_seconds=1234.5,
            train_seconds=123.4,
            update_seconds=12.34,
            step_seconds=1400.0,
            predicted_saving=0.98,
            rollout={"prefix_hit_rate": 1.0},
            collector={"collector/dropped": 1234.0},
            wait={"wait/policy_too_old": 99.9},
            verify={"dta/verify_alarm": 1.0},
        )
        view.step(step)
        console.print(view)
        *head, row, _ = out.getvalue().splitlines()
        assert all(len(line) <= width for line in head)
        assert "…" not in out.getvalue()
        assert len(head) <= 2  # no title takes a third line
        num_columns = len(COLUMNS["ppo"]) + 2  # the step and the alarm
        if width >= 80:
            assert len(row.split()) == num_columns
        else:
            assert 4 <= len(row.split()) < num_columns

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0.0, "0"),
            (0.25, "0.25"),
            (9.999, "10.0"),
            (12.34, "12.3"),
            (99.96, "100"),
            (1000.0, "1.0k"),
            (12_500.0, "12k"),
            (999_600.0, "1.0M"),
            (-0.5, "-0.50"),
        ],
    )
    def test_brief_numbers(self, value: float, text: str) -> None:
        assert brief(value) == text

    def test_unknown_values_are_dashes(self) -> None:
        view, out = self.view(terminal=False)
        with view:
            view.step(StepMetrics(1, *[None] * (len(fields(StepMetrics)) - 1)))
        assert "reward -  loss -" in out.getvalue()

    def test_table_on_a_terminal(self) -> None:
        view, out = self.view(terminal=True)
        with view:
            view.set_run(50)
            view.status("training")
            for step in range(1, SHOWN_STEPS + 3):
                view.step(make_step(step))
        last = out.getvalue().rsplit("sharing", 1)[1]
        shown = [line.split()[0] for line in last.splitlines() if "/50" in line]
        assert shown == [f"{s}/50" for s in range(3, SHOWN_STEPS + 3)]
        assert "9,600" in last
        assert "6.00" in last

    def test_the_table_counts_what_is_not_trained(self) -> None:
        metrics = step_metrics(1, {"collector/dropped": 3.0}, None, 1.0)
        (column,) = [c for c in COLUMNS["ppo"] if c.label == "not_trained"]
        assert column.text(metrics) == "3"

    def test_the_table_shows_the_hit_rate_of_the_server(self) -> None:
        stats = {"rollout/prefix_hit_rate": 0.934}
        (column,) = [c for c in COLUMNS["ppo"] if c.label == "prefix_hits_%"]
        assert column.text(step_metrics(1, stats, None, 1.0)) == "93"
