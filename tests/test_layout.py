"""The layout of the package: imports point downwards, modules and packages keep a size.

Each test lists every place that breaks its rule.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "areal_dta"

LAYERS = (
    ("tree",),
    ("schedule",),
    ("balance",),
    ("config",),
    ("executor",),
    ("doctor",),
    ("areal_fixes",),
    ("engine",),
    ("collector",),
    ("rollout_server",),
    ("embedded",),
    ("tasks", "report", "processes"),
    ("inspect",),
    ("trainers",),
    ("startup",),
    ("launch",),
)
"""Packages of `areal_dta`, lowest first. A module imports from its own package and from
lower layers; not from higher ones, and not from another package of its own layer."""

MAX_MODULES = 14
"""Maximum number of modules per package, `__init__` included, subpackages apart."""
MIN_LINES, MAX_LINES = 40, 400
"""Bounds of a module. A shorter one says why in the first line of its docstring:
``(Separate module: reason)``. Modules that only run others, and `__init__`, may be
short."""

NO_CODE = {
    getattr(tokenize, kind)
    for kind in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
}

LIGHT = {
    "areal_dta.tree, areal_dta.schedule, areal_dta.balance": "torch areal transformers",
    "areal_dta.config.composed": "torch areal transformers",
    "areal_dta.config.backends": "torch areal transformers",
    "areal_dta.config.engine_options": "torch areal transformers",
    "areal_dta.config.server_options": "torch areal transformers pydantic",
    "areal_dta.executor": "areal ray hydra",
    "areal_dta.doctor.report": "areal ray hydra",
    "areal_dta.engine.setting_checks": "torch areal transformers",
    "areal_dta.rollout_server.server": "torch areal",
    "areal_dta.rollout_server.app": "areal",
    "areal_dta.inspect.__main__": "torch areal transformers",
    "areal_dta.embedded": "torch areal transformers numpy",
    "areal_dta.launch, areal_dta.processes.supervisor": "torch areal matplotlib",
}
"""What importing these modules must not import: seconds of start-up each."""


def package_of(module: str) -> str:
    """Return the part of `areal_dta.part.…` that LAYERS names."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), path


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Return line and name of our modules that a file imports, anywhere in it.

    Imports inside functions and under TYPE_CHECKING count, and so do names in strings
    that are given to ``import_module``: a dependency is one, whenever it is loaded.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            # `from areal_dta import engine` imports areal_dta.engine
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            strings = (n for n in ast.walk(node) if isinstance(n, ast.Constant))
            names = [n.value for n in strings if isinstance(n.value, str)]
        for name in names:
            if name.split(".")[0] == "areal_dta":
                yield node.lineno, name


def test_every_package_has_a_layer() -> None:
    known = [name for layer in LAYERS for name in layer]
    assert sorted(known) == sorted({package_of(m) for m, _ in modules()} - {""})


def test_imports_point_downwards() -> None:
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    wrong = []
    for module, path in modules():
        own = package_of(module)
        for line, imported in imported_modules(path):
            other = package_of(imported)
            if own and other in level and other != own:
                if level[other] >= level[own]:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_no_package_has_too_many_modules() -> None:
    numbers = {
        str(path.parent.relative_to(ROOT)): len(list(path.parent.glob("*.py")))
        for path in PACKAGE.rglob("__init__.py")
    }
    wrong = {name: num for name, num in numbers.items() if num > MAX_MODULES}
    assert not wrong, f"more than {MAX_MODULES} modules: {wrong}"


def test_no_module_is_too_short_or_too_long() -> None:
    wrong = []
    for _, path in modules():
        text = path.read_text()
        num_lines = len(text.splitlines())
        first_line = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
        has_reason = "(Separate module: " in first_line
        is_short = num_lines < MIN_LINES and path.name not in (
            "__init__.py",
            "__main__.py",
        )
        if num_lines > MAX_LINES or (is_short and not has_reason):
            wrong.append(f"{path.relative_to(ROOT)}: {num_lines} lines")
        if has_reason and not is_short:
            wrong.append(f"{path.relative_to(ROOT)}: needs no reason any more")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("names", LIGHT)
def test_imports_stay_light(names: str) -> None:
    code = f"import sys, {names}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    loaded = sorted(set(LIGHT[names].split()) & set(done.stdout.split()))
    assert not loaded, f"importing {names} imports {loaded}"


def test_the_method_has_the_size_that_the_documentation_says() -> None:
    text = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    match = re.search(r"The method is (.*?), about ([\d,]+) lines of code", text)
    assert match is not None
    folders = re.findall(r"`(\w+)/`", match[1])
    num_lines = sum(
        num_code_lines(path)
        for folder in folders
        for path in (PACKAGE / folder).rglob("*.py")
    )
    said = int(match[2].replace(",", ""))
    assert abs(num_lines - said) <= 0.1 * said, f"{num_lines} lines in {folders}"


def num_code_lines(path: Path) -> int:
    """Count the lines that hold code: no comments, docstrings or blank lines."""
    source = path.read_text()
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)
