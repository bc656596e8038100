"""The installation for GPUs: it resolves, and the suite passes with what it pins.

Slow: asks the package index; the second test installs torch (minutes, 7 GB).
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OVERRIDES = ROOT / "requirements" / "gpu-overrides.txt"
# What SGLang pins, and what the tests of the executor and the engine import.
PINNED_TORCH = "2.9.1"
TESTS = ["tests/tree", "tests/schedule", "tests/executor", "tests/engine"]


def uv_in(folder: Path) -> str:
    """Return the command uv, installed into ``folder`` if there is none."""
    if (found := shutil.which("uv")) is not None:
        return found
    venv.create(folder / "uv", with_pip=True)
    python = folder / "uv" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "uv"], check=True, timeout=600
    )
    return str(folder / "uv" / "bin" / "uv")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_extra_resolves_to_versions_of_areal(tmp_path, python):
    done = subprocess.run(
        [
            *(uv_in(tmp_path), "pip", "compile", "-q", "--no-annotate"),
            *("--python-version", python),
            *("--python-platform", "x86_64-manylinux_2_28"),
            *("--extra", "gpu", "--override", OVERRIDES),
            ROOT / "setup.py",
        ],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)$", done.stdout, re.MULTILINE))
    assert versions["areal"] == "1.0.4"
    assert versions["torch"] == PINNED_TORCH
    assert versions["sglang"] == "0.5.10.post1"
    assert versions["transformers"] == "5.3.0"
    assert "flash-attn-4" in versions


def test_the_overrides_are_those_that_are_documented():
    lines = [
        line
        for line in OVERRIDES.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert len(lines) == 5
    command = f'uv pip install --python python -e ".[gpu]" --override {OVERRIDES.name}'
    command = command.replace(OVERRIDES.name, "requirements/gpu-overrides.txt")
    assert command in (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_the_suite_passes_on_the_torch_that_sglang_pins(tmp_path):
    """SGLang and its kernels need a GPU's driver at most when they run: AReaL alone is
    installed here, with torch held at SGLang's version."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    uv = uv_in(tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    venv.create(tmp_path / "env", with_pip=False)
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(f"torch=={PINNED_TORCH}\n")
    subprocess.run(
        [
            *(uv, "pip", "install", "-q", "--python", python, "-e", f"{ROOT}[test]"),
            *("--constraint", constraint),
        ],
        check=True,
        timeout=1800,
    )
    version = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert version.startswith(PINNED_TORCH)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3300,
    )
    print(done.stdout[-3000:], file=sys.stderr)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 600
