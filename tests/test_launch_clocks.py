"""The launcher's clocks and log, with a fake training process."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from areal_dta import launch
from areal_dta.config.schema import LaunchOptions
from areal_dta.processes.log_rotation import NUM_KEPT, rotate
from areal_dta.processes.supervisor import Supervisor
from areal_dta.report.log_alerts import AlertReader
from areal_dta.report.step_metrics import step_metrics

START = """
import json, os, sys, time
fd = int(sys.argv[sys.argv.index("--event-fd") + 1])
def send(kind, **values):
    os.write(fd, (json.dumps({"kind": kind, **values}) + chr(10)).encode())
send(
    "start", algorithm="ppo", num_steps=1, note="", launch=LIMITS, recover_pointer=None
)
"""
STEP = step_metrics(1, {}, None, 1.0).to_record()


def run_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, **limits: float
) -> tuple[int, str]:
    """Run the launcher with a script in the place of the training process."""
    import sys

    options = LaunchOptions().limits("local") | limits
    path = tmp_path / "process.py"
    path.write_text(START.replace("LIMITS", repr(options)) + script)

    def supervised(command: Sequence[str], log_path: Path) -> Supervisor:
        return Supervisor([sys.executable, str(path)], log_path)

    monkeypatch.setattr(launch, "Supervisor", supervised)
    output = io.StringIO()
    launcher = launch.Launcher(tmp_path, Console(file=output, width=200))
    return launcher.run(tmp_path / "config.yaml", []), output.getvalue()


def test_the_first_step_is_not_on_the_clock_of_the_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
send("training", first_step=1)
time.sleep(3)
send("step", **{STEP!r})
send("done", checkpoint=None)
"""
    limits = {"startup_timeout_seconds": 1.0, "step_timeout_seconds": 60.0}
    code, output = run_launcher(tmp_path, monkeypatch, script, **limits)
    assert code == 0, output


def test_the_first_step_has_a_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "send('training', first_step=4)\ntime.sleep(60)"
    limits = {"step_timeout_seconds": 1.0, "grace_seconds": 1.0}
    code, output = run_launcher(tmp_path, monkeypatch, script, **limits)
    assert code == 1
    assert "waited 1 s for step 4; see the log, or raise launch.step_time" in output


def test_the_end_is_waited_for_within_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path / "ended"
    script = f"""
send("done", checkpoint=None)
time.sleep(3)
open({str(ended)!r}, "w").close()
"""
    code, output = run_launcher(tmp_path, monkeypatch, script, grace_seconds=60.0)
    assert code == 0 and ended.exists(), output
    ended.unlink()
    run_launcher(tmp_path, monkeypatch, script, grace_seconds=0.5)
    assert not ended.exists()


def test_only_this_machine_has_a_short_grace_period() -> None:
    assert LaunchOptions().limits("local")["grace_seconds"] == 15.0
    for scheduler in ("slurm", "ray"):
        assert LaunchOptions().limits(scheduler)["grace_seconds"] >= 600.0
    assert LaunchOptions(grace_seconds=5.0).limits("slurm")["grace_seconds"] == 5.0


def test_the_log_is_bounded_and_its_errors_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
for part in range(10):
    for _ in range(2000):
        print("x" * 99, flush=False)
    sys.stdout.flush()
    time.sleep(0.5)
print("(AReaL) 20260101-00:00:00.000 Last ERROR: the disk is full", flush=True)
time.sleep(0.5)
send("done", checkpoint=None)
"""
    code, output = run_launcher(tmp_path, monkeypatch, script, max_log_megabytes=0.15)
    assert code == 0, output
    assert "Last: the disk is full" in output
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("launch.log*")}
    assert set(sizes) == {"launch.log", *(f"launch.log.{n + 1}" for n in range(4))}
    assert all(0 <= size < 1_500_000 for size in sizes.values()), sizes


def test_rotation_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    writer = open(path, "ab", buffering=0)  # as a worker holds it
    alerts = AlertReader(path)
    for number in range(NUM_KEPT + 2):
        writer.write(b"%d\n" % number * 50)
        assert not rotate(path, 1000)
        alerts.read_new()
        assert rotate(path, 10)
    assert path.read_bytes() == b""
    kept = [path.with_name(f"run.log.{n}").read_bytes() for n in (1, NUM_KEPT)]
    assert kept == [b"5\n" * 50, b"2\n" * 50]
    assert not path.with_name(f"run.log.{NUM_KEPT + 1}").exists()
    writer.write(b"(AReaL) 1 Late ERROR: found\n")
    assert [alert.text for alert in alerts.read_new()] == ["Late: found"]
    writer.close()
