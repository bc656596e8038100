"""The report of the command: numbers, prediction, table, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_dta.inspect.__main__ import main, parse_args, run
from areal_dta.inspect.models import model_sizes
from areal_dta.inspect.prediction import Budgets, predict
from areal_dta.schedule import NeededOutputs
from areal_dta.tree import PrefixTree


def star(num: int, prompt: int, answer: int) -> list[dict[str, Any]]:
    """Return a prompt with answers that share nothing, and carry loss."""
    return [
        {
            "prompt_ids": list(range(prompt)),
            "completion_ids": [1000 + answer * i + k for k in range(answer)],
        }
        for i in range(num)
    ]


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in star(8, 100, 20)))
    return path


def test_numbers_of_a_star(rollouts: Path) -> None:
    report = run(parse_args([str(rollouts), "--ranks", "2"])).report
    sharing = report["sharing"]
    assert sharing["num_sequences"] == 8
    assert sharing["num_sequence_tokens"] == 8 * 120
    assert sharing["num_tree_tokens"] == 100 + 8 * 20
    assert sharing["num_loss_tokens"] == 8 * 20
    assert sharing["num_computed_tokens"] == 100 + 8 * 19  # the last predicts nothing
    assert (sharing["num_nodes"], sharing["num_leaves"]) == (9, 8)
    branches = report["histograms"]["branch_tokens"]
    assert branches == [
        {"from": 16, "to": 32, "count": 8},
        {"from": 32, "to": 64, "count": 0},
        {"from": 64, "to": 128, "count": 1},
    ]
    forks = report["histograms"]["fork_depth_tokens"]
    assert forks == [{"from": 64, "to": 128, "count": 1}]
    assert [r["num_sequences"] for r in report["balance"]["ranks"]] == [4, 4]
    assert report["balance"]["num_repeated_tokens"] == 100
    assert report["lost_sharing"]["findings"] == []


def test_files_that_it_writes(rollouts: Path, tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("r.json", "r.html", "r.npz")]
    code = main(
        [str(rollouts), "--json", str(names[0]), "--html", str(names[1])]
        + ["--npz", str(names[2]), "--quiet"]
    )
    assert code == 0
    assert json.loads(names[0].read_text())["sharing"]["num_sequences"] == 8
    assert names[1].read_text().startswith("<!doctype html>")
    # What was written can be read again, masks included.
    again = run(parse_args([str(names[2])])).report["sharing"]
    assert again["num_tree_tokens"] == 260
    assert again["num_loss_tokens"] == 160


def test_table_fits_80_columns(
    rollouts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(rollouts), "--memory", "0.001"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "3.69" in text  # 960 / 260
    assert "Nothing fits into" in text


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["missing.jsonl"], "no such file"),
        (["{file}", "--model", "nonsense=3"], "expected NAME=NUMBER"),
        (["{file}", "--model", "hidden=64"], "num_hidden_layers"),
        (["{file}", "--model", "{file}"], "not a model's config"),
        (["{file}", "--memory", "-1"], "--memory -1"),
        (["{file}", "--ranks", "0"], "--ranks 0"),
        (["{file}", "--retain-tokens", "few"], "--retain-tokens few"),
        (["{file}", "--template-arguments", "{{"], "not JSON"),
        (["{file}", "--tokenizer", "{folder}"], "no tokenizer.json"),
        (["{file}", "--max-tokens", "10"], "more than --max-tokens 10"),
        (["{file}", "--json", "{folder}/no/folder/x.json"], "cannot write"),
        (["{folder}/empty"], "a folder without .jsonl"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    expected: str,
    rollouts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"file": str(rollouts), "folder": str(tmp_path)}
    assert main([a.format(**places) for a in arguments] + ["--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert expected in error


def batch() -> tuple[PrefixTree, NeededOutputs]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 500, 600)
    rows = [np.concatenate([prompt, rng.integers(0, 500, 200)]) for _ in range(6)]
    tree = PrefixTree.from_sequences(rows)
    masks = [np.arange(1, 800) >= 600 for _ in rows]
    return tree, NeededOutputs.logprobs_at(tree, masks)


def test_less_memory_never_makes_it_faster() -> None:
    tree, needed = batch()
    model = model_sizes("20m", "float32", "cpu")
    free = predict(tree, needed, model, Budgets())
    previous = free.way("dta")
    assert free.fits
    for share in (0.8, 0.5, 0.3):
        limit = previous.peak_bytes * share
        found = predict(tree, needed, model, Budgets(memory_bytes=limit))
        if not found.fits:
            break
        assert found.way("dta").peak_bytes <= limit
        assert found.way("dta").cost >= free.way("dta").cost
    assert found.way("dta").peak_bytes < 0.6 * free.way("dta").peak_bytes


def test_speed_up_follows_the_sharing() -> None:
    tree, needed = batch()
    model = model_sizes("qwen3-1.7b", "bfloat16", "gpu")
    found = predict(tree, needed, model, Budgets())
    # 4,800 tokens against 1,794 that are computed, logits at 1,194 of them
    assert 2.6 < found.speed_up("dta") < 3.6
    assert found.speed_up("dense_ckpt") == pytest.approx(0.8, abs=0.05)
    assert found.way("dense_ckpt").peak_bytes < found.way("dense").peak_bytes


def test_peak_is_what_the_executor_holds() -> None:
    """Counted bytes of live tensors, on a small model: within 20 %."""
    torch = pytest.importorskip("torch")
    from bench.measure import peak_bytes
    from bench.models import build_model
    from bench.variants import make_variant
    from bench.workloads import Work, Workload

    torch.manual_seed(0)
    torch_model = build_model("20m", torch.float32, torch.device("cpu"), 0)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 500, 150)
    rows = tuple(np.concatenate([prompt, rng.integers(0, 500, 50)]) for _ in range(4))
    masks = tuple(np.arange(200) >= 150 for _ in rows)
    work = Work.of(Workload("test", "generated", rows, masks), torch.device("cpu"), 0)
    model = model_sizes("20m", "float32", "cpu")
    needed = NeededOutputs.logprobs_at(work.tree, work.positions)
    budgets = Budgets(block_tokens=128, retain_tokens=0, is_retain_given=True)
    found = predict(work.tree, needed, model, budgets)
    for name, variant in (("dense", "dense"), ("dta", "dta@128/0")):
        runner = make_variant(variant, torch_model, {})
        for parameter in torch_model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        measured = peak_bytes(lambda runner=runner: runner.run(work), torch_model)
        assert found.way(name).peak_bytes == pytest.approx(measured, rel=0.2), name
