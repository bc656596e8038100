"""The end-to-end benchmark's arguments, commands and report; it runs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_e2e
import pytest
from bench.e2e_report import PARTS, Run, plot, report, step_parts, summarize, table

# Lines of metrics.jsonl: of a run now, and of one of 0.1.0, which records less.
NOW = {
    "step": 3,
    "reward": 0.5,
    "sequence_tokens": 7000,
    "tree_tokens": 1400,
    "rollout_seconds": 1.0,
    "train_seconds": 2.0,
    "logprob_seconds": 0.5,
    "update_seconds": 0.25,
    "step_seconds": 4.0,
    "logprob_gap": 1e-6,
    "rollout": {"prefix_hit_rate": 0.9},
    "wait": {"wait/rollout": 0.75, "wait/policy_too_old": 0.25},
}
THEN = {
    key: value
    for key, value in NOW.items()
    if key not in ("logprob_seconds", "rollout", "wait", "logprob_gap")
}


def records(base: dict[str, Any], *seconds: float) -> list[dict[str, Any]]:
    return [
        {**base, "step": i + 1, "step_seconds": s, "reward": 0.1 * i}
        for i, s in enumerate(seconds)
    ]


def make_run(variant: str, *seconds: float, base: dict[str, Any] = NOW) -> Run:
    return Run("main", variant, 1, 2.5, records(base, *seconds))


def test_parts_add_up_to_the_step() -> None:
    parts = step_parts(NOW)
    assert list(parts) == list(PARTS)
    assert sum(value or 0.0 for value in parts.values()) == NOW["step_seconds"]
    assert (parts["logprobs"], parts["train"]) == (0.5, 1.5)


def test_an_older_run_has_no_logprobs_apart() -> None:
    parts = step_parts(THEN)
    assert (parts["logprobs"], parts["train"]) == (None, 2.0)
    assert sum(value or 0.0 for value in parts.values()) == THEN["step_seconds"]


def test_medians_leave_the_warm_up_out() -> None:
    runs = [make_run("dta", 90.0, 5.0, 4.0, 6.0), make_run("dta", 80.0, 7.0, 5.5, 5.5)]
    summary = summarize(runs, num_warm_up=1)
    assert (summary["runs"], summary["steps"]) == (2, 6)
    assert summary["step_seconds"] == 5.5
    assert summary["waits"] == NOW["wait"]
    assert summary["prefix_hit_rate"] == 0.9
    assert summary["first_reward"] == [pytest.approx(0.15)] * 2
    with pytest.raises(ValueError, match="4 steps, of which 4 are warm-up"):
        summarize(runs, num_warm_up=4)


def test_ratios_are_to_the_dense_twin(tmp_path: Path) -> None:
    runs = [make_run("dta", 9.0, 4.0), make_run("dense", 9.0, 8.0, base=THEN)]
    workloads = report(runs, num_warm_up=1)
    assert workloads["main"]["dta"]["step_ratio"] == 2.0
    assert workloads["main"]["dense"]["step_ratio"] == 1.0
    assert workloads["main"]["dta"]["train_ratio"] == 1.0  # logprobs on both sides
    json.dumps(workloads, allow_nan=False)
    rows = [line for line in table(workloads).splitlines() if line.startswith("| d")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:5] for row in cells] == [
        ["dta", "4.00", "1.00", "0.50", "1.50"],
        ["dense", "8.00", "1.00", "-", "2.00"],
    ]
    plot(workloads, tmp_path / "e2e.png")
    assert (tmp_path / "e2e.png").stat().st_size > 10_000
    alone = report(runs[:1], num_warm_up=1)
    assert alone["main"]["dta"]["step_ratio"] is None


def test_commands() -> None:
    args = bench_e2e.parse_args(
        "--workloads tau2-6m,main --variants dense --steps 8 --override a.b=1".split()
    )
    assert args.workloads == ["tau2-6m", "main"]
    words = bench_e2e.command(args, "tau2-6m", "dense", 3, Path("/model"))
    assert words[1:] == [
        *("-m", "areal_dta.launch", "--config", "tau2_smoke.yaml"),
        *("actor.backend=fsdp:d1", "seed=3", "total_train_steps=8"),
        *("cluster.fileroot=outputs", "actor.path=/model", "a.b=1"),
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--workloads mian", "--workloads mian: expected some of main, calculator"),
        ("--variants dta,sparse", "--variants sparse: expected some of dta, dense"),
        ("--steps 2 --warm-up 2 --variants dta", "expected 0 to 1 for --steps 2"),
        ("--base {tmp}", "expected a checkout with areal_dta/launch.py"),
    ],
)
def test_bad_arguments_are_refused(
    argv: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_e2e.parse_args(argv.format(tmp=tmp_path).split())
    assert message in capsys.readouterr().err


def test_a_checkout_without_untouched_areal_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "areal_dta" / "config").mkdir(parents=True)
    (tmp_path / "areal_dta" / "launch.py").touch()
    base = ["--base", str(tmp_path)]
    with pytest.raises(SystemExit):
        bench_e2e.parse_args([*base, "--variants", "areal"])
    assert "has no backend areal-fsdp:d1" in capsys.readouterr().err
    backends = tmp_path / "areal_dta" / "config" / "backends.py"
    backends.write_text('NAMES = {"areal-fsdp": "fsdp"}\n')
    assert bench_e2e.parse_args([*base, "--variants", "areal"]).variants == ["areal"]


def test_a_model_is_the_embedded_one_scaled(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    num_parameters = bench_e2e.build_model("6m", tmp_path / "model")
    assert 6e6 < num_parameters < 7e6
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) <= config.vocab_size
    assert config.hidden_size == 256
