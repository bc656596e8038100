"""No file is unpickled: loading one must not run code."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICKLING = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# How a call has to be restricted, by the end of its name.
SAFE = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}


def problems(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "pandas.read_pickle" or called.endswith(".read_pickle"):
                found.append(f"{path}:{node.lineno}: {called}")
            if called in SAFE:
                key, value = SAFE[called]
                given = {
                    k.arg: k.value.value
                    for k in node.keywords
                    if isinstance(k.value, ast.Constant)
                }
                if given.get(key, not value) is not value:
                    found.append(
                        f"{path}:{node.lineno}: {called} without {key}={value}"
                    )
        if PICKLING & {name.split(".")[0] for name in names}:
            found.append(f"{path}:{node.lineno}: imports {', '.join(names)}")
    return found


# Reads the pickled parts of AReaL's own recover checkpoints, of 0.1.0.
EXCEPTIONS = ("areal_dta/areal_fixes/slot_files.py",)


def test_nothing_is_unpickled() -> None:
    paths = [p for name in ("areal_dta", "recipes", "scripts") for p in files(name)]
    assert len(paths) > 100
    allowed = [ROOT / name for name in EXCEPTIONS]
    assert not [text for p in paths if p not in allowed for text in problems(p)]


def test_tests_load_weights_only() -> None:
    # They may look into the files that AReaL has pickled.
    found = [text for path in files("tests") for text in problems(path)]
    assert not [text for text in found if "imports pickle" not in text]


def test_a_bad_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("import pickle\nimport torch\ntorch.load('x')\n")
    assert len(problems(path)) == 2


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))
