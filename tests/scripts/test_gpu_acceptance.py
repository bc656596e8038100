"""The acceptance kit: its parts in small on a CPU, and what it does without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_acceptance.sh"


def run(out: Path, *options: str, timeout: float = 900):
    environment = os.environ | {
        "OUT": str(out),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    return subprocess.run(
        ["bash", SCRIPT, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_options_and_time():
    """Unknown options are refused; all time-outs together are under 25 minutes."""
    done = subprocess.run(
        ["bash", SCRIPT, "--fast"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "--fast" in done.stderr
    seconds, num_models = 0, 3
    for line in SCRIPT.read_text().splitlines():
        words = line.split()
        if words[:1] == ["part"]:
            seconds += int(words[2]) * (num_models if "benchmark" in words[1] else 1)
    assert 600 < seconds <= 25 * 60


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_part_in_small(tmp_path):
    done = run(tmp_path, "--dry", timeout=3500)
    summary = json.loads((tmp_path / "summary.json").read_text())
    ended = {part["part"]: part["status"] for part in summary["parts"]}
    assert ended == dict.fromkeys(
        ["doctor", "tests", "benchmark:tiny", "projection", "grpo"], 0
    ), done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode == 0 and summary["dry"]
    assert json.loads((tmp_path / "doctor.json").read_text())["problems"] == []
    bench = json.loads((tmp_path / "bench-tiny.json").read_text())
    for workload in bench["workloads"]:
        names = [m["variant"] for m in workload["measurements"]]
        assert names == ["dense_packed", "dta_auto"]
        assert workload["measurements"][1]["gradient_error"] < 1e-5
    assert json.loads((tmp_path / "projection.json").read_text())["rows"]
    steps = (tmp_path / "grpo.jsonl").read_text().splitlines()
    assert len(steps) == 2 and "reward" in steps[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_part_that_is_cut_short_leaves_what_it_has(tmp_path):
    """Its status is that of `timeout`; the parts after it run all the same."""
    text = SCRIPT.read_text().replace("part doctor 150", "part doctor 1")
    copy = ROOT / "scripts" / f"acceptance-{os.getpid()}.sh"
    copy.write_text(text)
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    try:
        done = subprocess.run(
            ["bash", copy, "--dry", "--only", "doctor,tests"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
    finally:
        copy.unlink()
    first, second = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert done.returncode == 1
    assert first["part"] == "doctor" and first["timed_out"]
    assert second["part"] == "tests" and second["status"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run(tmp_path, "--only", "doctor", timeout=300)
    assert done.returncode == 1
    assert "no CUDA device; --dry runs on a CPU" in done.stderr
