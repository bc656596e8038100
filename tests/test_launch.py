"""What the launcher says of a run that failed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from areal_dta.launch import Launcher

COMMAND = "python -m areal_dta.launch --config run.yaml 'train_dataset.path=my data'"


@pytest.mark.parametrize(
    "pointer, expected",
    [
        ("recover_current", f"resume        {COMMAND}\n"),
        ("none yet", f"resume        {COMMAND}   (starts anew: nothing was saved yet)"),
        (None, f"resume        {COMMAND} recover.mode=on   (starts anew: it was off)"),
    ],
)
def test_how_to_continue_a_run_that_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pointer: str | None,
    expected: str,
) -> None:
    (tmp_path / "recover_current").write_text("a")
    output = io.StringIO()
    launcher = Launcher(tmp_path, Console(file=output, width=40))

    def follow(*args: object) -> None:
        launcher._handle(
            {
                "kind": "start",
                "algorithm": "sft",
                "num_steps": 3,
                "note": "",
                "launch": dict.fromkeys(
                    ("startup_timeout_seconds", "step_timeout_seconds"), 60.0
                ),
                "recover_pointer": pointer and str(tmp_path / pointer),
            }
        )
        launcher._handle({"kind": "error", "text": "a worker died"})

    monkeypatch.setattr(launcher, "_follow", follow)
    monkeypatch.setattr("areal_dta.launch.Supervisor", _NoProcess)
    code = launcher.run(Path("run.yaml"), ["train_dataset.path=my data"])
    assert code == 1
    assert expected in output.getvalue()


class _NoProcess:
    def __init__(self, command: list[str], log: Path) -> None:
        pass

    def stop(self) -> None:
        pass
