"""The registry of repairs: complete, documented, and a guard at start-up."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from areal_dta.areal_fixes import registry
from areal_dta.areal_fixes.registry import REPAIRS, Repair, check_versions
from areal_dta.config.composed import ConfigError
from areal_dta.config.resolved import ResolvedRun, resolve
from areal_dta.config.schema import to_structured
from areal_dta.startup.compose import compose, find_config

TABLE = Path(__file__).parents[2] / "docs" / "repairs.md"


@pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.name)
def test_what_it_names_is_there(repair: Repair) -> None:
    module, name = repair.name.split(".")
    assert getattr(import_module(f"areal_dta.areal_fixes.{module}"), name).__doc__
    repair.check_version()


def test_the_table_in_the_documentation_is_this_one() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    assert rows == [registry.table_row(repair) for repair in REPAIRS]


@pytest.mark.parametrize(
    "package, overrides",
    [
        ("areal", []),
        ("ray", ["scheduler.type=ray"]),
        ("torch", ["actor.backend=dta:d2"]),
    ],
)
def test_an_unknown_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, package: str, overrides: list[str]
) -> None:
    def load(*more: str) -> ResolvedRun:
        return resolve(to_structured(compose(find_config("gsm8k_grpo"), [*more])))

    config = load("hardware=cpu", *overrides)
    check_versions(config)
    found = registry.version
    monkeypatch.setattr(
        registry, "version", lambda name: "99.0.5" if name == package else found(name)
    )
    (first, *_) = [repair for repair in REPAIRS if repair.package == package]
    message = f"areal_fixes.{first.name} repairs {package} {first.versions}, found 99"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_versions(config)
    if overrides:  # a package that a run does not use does not stop it
        check_versions(load("hardware=cpu"))
