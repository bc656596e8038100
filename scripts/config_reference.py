"""Write docs/configuration.md from the dataclasses of the configuration.

    python scripts/config_reference.py            # --check: only compare

Listed are our additions to AReaL's configuration: fields of classes in `areal_dta` and
`recipes`, with the text that stands under (or, as ``#:``, above) each in the source.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from areal_dta.config import schema
from recipes.tau2.config import Tau2Config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
OURS = ("areal_dta.", "recipes.")

INTRO = """\
# Configuration

The keys that this package adds to AReaL's configuration, with their defaults. AReaL's
own keys keep their names and meanings ([differences.md](differences.md) has the
exceptions). Keys are set in the YAML or as `key=value` behind the command, in Hydra's
grammar; `--dry-run` prints the whole resolved configuration, AReaL's part included.

Made by `python scripts/config_reference.py` from the dataclasses; a test compares.

## Config groups

| | |
|---|---|
"""
GROUPS = {
    "hardware": "what the machine has; `auto` looks for CUDA and says what it chose",
    "model": "the model to train, unless `actor.path` names another",
    "scheduler": "who starts the workers",
}
SECTIONS = (
    ("Every run", "", schema.JobFields),
    ("Learning from rollouts (`algorithm: ppo`)", "", schema.DTAGRPOConfig),
    ("Tree engine", "actor.dta", schema.DTAOptions),
    ("Collector", "collector", schema.CollectorOptions),
    ("Embedded rollout server", "local", schema.LocalServerConfig),
    ("Launcher and processes", "launch", schema.LaunchOptions),
    ("Report", "report", schema.ReportOptions),
    ("Recipe τ²-bench", "", Tau2Config),
)
"""Title, key of the section, class. Further sections are found in the classes."""


def page() -> str:
    """Return the page's text."""
    rows = []
    for group, what in GROUPS.items():
        options = sorted(p.stem for p in (ROOT / "configs" / group).glob("*.yaml"))
        rows.append(f"| `{group}=` {', '.join(f'`{o}`' for o in options)} | {what} |")
    parts = [INTRO + "\n".join(rows)]
    done: set[type] = set()
    queue = list(SECTIONS)
    while queue:
        title, key, cls = queue.pop(0)
        if cls in done:
            continue
        done.add(cls)
        lines = []
        for field, text in own_fields(cls):
            name = f"{key}.{field.name}" if key else field.name
            inner = dataclass_of(get_type_hints(cls)[field.name])
            if inner is not None:
                if inner.__module__.startswith(OURS) and not is_model(inner):
                    queue.append((f"Section `{name}`", name, inner))
                continue
            kind = " or ".join(type_names(get_type_hints(cls)[field.name]))
            lines.append(f"| `{name}` | {kind} | {default_of(field)} | {text} |")
        if lines:
            doc = first_paragraph(cls)
            head = "| key | type | default | meaning |\n|---|---|---|---|"
            parts.append("\n".join([f"## {title}\n\n{doc}\n\n{head}", *lines]))
    parts.append(
        "`critic`, `ref` and `teacher.train` have a section `dta` as `actor` has."
    )
    return "\n\n".join(parts) + "\n"


def own_fields(cls: type) -> Iterator[tuple[dataclasses.Field[Any], str]]:
    """Yield the fields that classes of ours declare, with their text; base first."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    is_mixin_listed = cls is not schema.JobFields and issubclass(cls, schema.JobFields)
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith(OURS):
            continue
        if is_mixin_listed and base is schema.JobFields:
            continue  # a section of its own
        if base is schema.DTAGRPOConfig and cls is not base:
            continue
        texts = field_texts(base)
        for name in base.__dict__.get("__annotations__", {}):
            if name in fields and not name.startswith("_"):
                yield fields[name], texts.get(name, "")


def field_texts(cls: type) -> dict[str, str]:
    """Return the text of each field: a string under it, or ``#:`` lines above it."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for statement, below in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign):
            continue
        assert isinstance(statement.target, ast.Name)
        text = ""
        match below:
            case ast.Expr(value=ast.Constant(value=str(found))):
                text = found
        above = statement.lineno - 2
        comment: list[str] = []
        while above >= 0 and lines[above].strip().startswith("#:"):
            comment.insert(0, lines[above].strip().removeprefix("#:").strip())
            above -= 1
        words = " ".join((text or " ".join(comment)).split())
        texts[statement.target.id] = words.replace("``", "`").replace("|", "\\|")
    return texts


def first_paragraph(cls: type) -> str:
    text = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    text = text.removeprefix("Mixin; ")
    return text[:1].upper() + text[1:]


def type_names(hint: Any) -> list[str]:
    if get_origin(hint) is Union or "UnionType" in type(hint).__name__:
        return [name for part in get_args(hint) for name in type_names(part)]
    return ["null" if hint is type(None) else getattr(hint, "__name__", str(hint))]


def dataclass_of(hint: Any) -> type | None:
    """Return the dataclass that a field holds, also where it may be None."""
    for part in get_args(hint) or (hint,):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return part
    return None


def is_model(cls: type) -> bool:
    """Return whether a section is AReaL's, with a `dta` section added."""
    return any(base.__module__.startswith("areal.") for base in cls.__mro__)


def default_of(field: dataclasses.Field[Any]) -> str:
    value: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING or value == "???":
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"`{value}`" if value != "" else "empty"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args(argv)
    text = page()
    if args.check:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
