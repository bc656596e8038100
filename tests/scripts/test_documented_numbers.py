"""Numbers in README and docs are those of the committed JSON, and pages are up to date.

A number of a benchmark stands in a generated table, or is listed in claims.yaml.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import bench_rewards
import config_reference
import doc_tables
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLAIMS = yaml.safe_load((doc_tables.DATA / "claims.yaml").read_text())


def value_of(source: str) -> float:
    """Return ``FILE path``, ``… / …``, or ``… %``: percent above 1. Of a list, the
    largest."""
    if source.endswith(" %"):
        return (value_of(source.removesuffix(" %")) - 1) * 100
    above, _, below = source.partition(" / ")
    value: Any = doc_tables.find(above)
    number = max(value) if isinstance(value, list) else float(value)
    return number / value_of(below) if below else number


def agrees(text: str, value: float) -> bool:
    """Return whether a number as text is the value, rounded to as many digits."""
    digits = text.replace(",", "").lstrip("+")
    decimals = len(digits.partition(".")[2])
    # Half a digit and a little: exact halves are printed up or down.
    return abs(float(digits) - value) <= 0.501 * 10.0**-decimals


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c["text"][:40])
def test_a_number_in_running_text(claim: dict[str, Any]) -> None:
    page = " ".join((ROOT / claim["page"]).read_text(encoding="utf-8").split())
    text = " ".join(claim["text"].split())
    assert text in page, f"{claim['page']} does not say {text!r} any more"
    for number, source in claim["values"].items():
        assert str(number) in text
        value = value_of(source)
        assert agrees(str(number), value), f"{number} is {value} in {source}"


def test_tables_are_those_of_the_data() -> None:
    for path in doc_tables.pages():
        text = path.read_text(encoding="utf-8")
        new = doc_tables.with_tables(text)
        assert new == text, f"{path}: run python scripts/doc_tables.py"


def test_every_data_file_is_used() -> None:
    """A committed JSON backs a table, a claim, or at least a command on a page."""
    texts = [path.read_text(encoding="utf-8") for path in doc_tables.pages()]
    used = "\n".join([*texts, (doc_tables.DATA / "claims.yaml").read_text()])
    used += (ROOT / "scripts" / "doc_tables.py").read_text()
    unused = [p.name for p in doc_tables.DATA.glob("*.json") if p.name not in used]
    assert not unused


def test_every_command_of_the_documentation_is_in_the_repository() -> None:
    for path in doc_tables.pages():
        for script in re.findall(r"python (\w+/\w+\.py)", path.read_text()):
            assert (ROOT / script).is_file(), f"{path} runs {script}"


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [("8.3", 8.318, True), ("8.3", 8.37, False), ("28,136", 28136.0, True)],
)
def test_agreement_is_that_of_rounding(text: str, value: float, expected: bool) -> None:
    assert agrees(text, value) is expected


def test_the_configuration_reference_is_up_to_date() -> None:
    assert config_reference.main(["--check"]) == 0, (
        "run python scripts/config_reference.py"
    )
    page = config_reference.page()
    for key in ("actor.dta.block_tokens", "collector.max_staleness", "local.host"):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{key}` ")]
        assert row.split("|")[4].strip(), f"{key} has no text"


def test_curves_are_read_from_complete_runs(tmp_path: Path) -> None:
    run = {"config": "gsm8k_sft.yaml", "seed": 7, "backend": "dta:d1", "steps": 2}
    folder = tmp_path / "gsm8k-sft" / "seed7-dta-d1"
    folder.mkdir(parents=True)
    names = "grad_norm sequence_tokens tree_tokens sharing_ratio rollout_seconds"
    record: dict[str, float | None] = dict.fromkeys(names.split(), 1.0)
    record |= {"train_seconds": 1.0, "step_seconds": 2.0, "reward": None, "loss": 0.25}
    lines = [json.dumps({"step": step, **record}) + "\n" for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    found = bench_rewards.curve_of(run, tmp_path)
    assert found == {**run, "metric": "loss", "values": [0.25, 0.25]}
