"""The site of the documentation is built without a warning, and its links lead on."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import site_pages
import yaml

ROOT = Path(__file__).parents[2]


def nav_pages(entries: list[object]) -> list[str]:
    """Return the pages of a nav, which nests lists and dicts."""
    found = []
    for entry in entries:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            found += nav_pages(target) if isinstance(target, list) else [str(target)]
    return found


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for page in nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]):
        folder = page.removesuffix(".md").removesuffix("index")
        html = (tmp_path / folder / "index.html").read_text(encoding="utf-8")
        # from somewhere else: neither scripts nor fonts
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://', html)
    assert (tmp_path / "benchmarks" / "cpu-tau2-airline.json").is_file()


def test_pages_of_the_nav_exist() -> None:
    made = set(site_pages.PAGES.values())
    for page in nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]):
        assert page in made or (ROOT / "docs" / page).is_file(), page


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("docs/migrate.md", "[a](../SECURITY.md)", "[a](security.md)"),
        ("docs/recipes.md", "[a](../recipes/tau2)", "[a](recipes-tau2.md)"),
        ("docs/log.md", "[a](../setup.py)", "a"),
        ("docs/log.md", "[`setup.py`](../setup.py)", "`setup.py`"),
        ("SECURITY.md", "[a](docs/recovery.md#files)", "[a](recovery.md#files)"),
        ("docs/benchmarks/cpu.md", "[a](../numerics.md)", "[a](../numerics.md)"),
        ("docs/log.md", "![a](../setup.py)", "![a](../setup.py)"),
        ("docs/log.md", "[a](https://x.org)", "[a](https://x.org)"),
        ("docs/log.md", "[a](nowhere.md)", "[a](nowhere.md)"),
    ],
)
def test_links(source: str, text: str, expected: str) -> None:
    assert site_pages.linked(ROOT / source, text) == expected


def test_ci_tests_by_the_command_of_the_readme() -> None:
    commands = re.findall(
        r"^pip install uv && .*$", (ROOT / "README.md").read_text(), re.M
    )
    train, test = commands
    assert train.endswith("python -m areal_dta.launch --config gsm8k_grpo.yaml")
    assert test in (ROOT / ".ci" / "run").read_text().splitlines()
    start = (ROOT / "docs" / "index.md").read_text().splitlines()
    assert train in start and test in start


def test_links_of_the_readme_lead_to_files() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
