"""The executor with the newest Transformers, in an environment without AReaL.

AReaL pins 5.3; a machine that only measures or only uses the executor may have a newer
one. Slow: it installs torch and transformers from the package index (minutes, 7 GB).
"""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# what the executor and its tests import, and nothing that would bring AReaL
REQUIREMENTS = [
    "torch==2.10.*",
    "transformers>=5.4,<6",
    "numpy",
    "scipy",
    "peft",
    "pytest",
    "pytest-timeout",
    "hypothesis",
]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_executor_tests_pass_with_the_newest_transformers(tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--no-cache-dir", *REQUIREMENTS]
    subprocess.run(install, check=True, timeout=1200)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    show = "import transformers, importlib.util as u; "
    show += "print(transformers.__version__, u.find_spec('areal'))"
    version = subprocess.run(
        [python, "-c", show],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout.split()
    assert tuple(map(int, version[0].split(".")[:2])) >= (5, 4), version
    assert version[1] == "None", "AReaL is installed: not the environment meant"

    tests = ["tests/tree", "tests/schedule", "tests/balance", "tests/executor"]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    print(f"transformers {version[0]}\n{done.stdout[-3000:]}", file=sys.stderr)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 200
