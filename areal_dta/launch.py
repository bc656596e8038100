"""Train: ``python -m areal_dta.launch --config gsm8k_grpo.yaml [key=value ...]``.

This process stays light: it imports neither torch nor AReaL. It composes the
configuration, starts the process that trains (`areal_dta.startup.train_process`), shows
what that process reports, and leaves no process behind, however the run ends.

Exit codes: 0 done, 1 the run failed, 2 the configuration cannot work, 130 Ctrl-C,
128 + N another signal.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from areal_dta.config.composed import ConfigError
from areal_dta.config.redaction import redact_text
from areal_dta.processes.log_rotation import remove_rotated, rotate
from areal_dta.processes.run_lock import locked
from areal_dta.processes.slurm_jobs import JOBS_FILE, cancel_leftovers
from areal_dta.processes.supervisor import Event, Supervisor
from areal_dta.report.live_table import RunView
from areal_dta.report.log_alerts import AlertReader
from areal_dta.report.plot import draw_run
from areal_dta.report.step_metrics import StepMetrics, read_metrics
from areal_dta.startup.compose import compose, find_config, project_config_dir, run_dir

# Until the training process has sent those of its configuration.
DEFAULT_LIMITS = {
    "startup_timeout_seconds": 900.0,
    "grace_seconds": 15.0,
    "max_log_megabytes": 64.0,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: an argument is missing or unknown.
    """
    parser = _Parser(
        prog="python -m areal_dta.launch",
        description="Train a language model on prefix trees: RL, SFT, DPO, rewards.",
        epilog="Overrides follow Hydra's grammar: actor.optimizer.lr=1e-5, and options "
        "of config groups: hardware=auto|cpu|gpu, model=tiny|qwen3-1.7b|...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="a YAML file; a bare name is looked up in the working directory, then "
        f"in {project_config_dir()}",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration and what the run would do, and stop",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(argv)


class Launcher:
    """Start, watch and end one run."""

    def __init__(self, directory: Path, console: Console) -> None:
        self.directory = directory
        self.log_path = directory / "launch.log"
        self.exit_code = 1
        self._console = console
        self._view = RunView(console)
        self._limits = dict(DEFAULT_LIMITS)
        self._note = ""
        self._command = ""
        self._recover_pointer: str | None = ""  # until the run has started
        self._config_error: str | None = None
        self._checkpoint: str | None = None
        self._ended = False  # the outcome is known; processes may still live
        self._signals: list[int] = []
        self._expect("the configuration", "startup_timeout_seconds")

    def run(self, config_file: Path, overrides: Sequence[str]) -> int:
        """Start the training process; return when all processes of the run are gone."""
        cancel_leftovers(self.directory / JOBS_FILE)
        self.log_path.write_bytes(b"")
        remove_rotated(self.log_path)
        words = ["python", "-m", "areal_dta.launch", "--config", str(config_file)]
        self._command = redact_text(shlex.join([*words, *overrides]))
        command = [sys.executable, "-m", "areal_dta.startup.train_process"]
        command += ["--config", str(config_file), *overrides]
        ending = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored by nohup
            ending.append(signal.SIGHUP)
        previous = {number: signal.signal(number, self._on_signal) for number in ending}
        supervisor = Supervisor(command, self.log_path)
        alerts = AlertReader(self.log_path)
        try:
            with self._view:
                self._follow(supervisor, alerts)
        finally:
            if (jobs_left := supervisor.stop()) is not None:
                self._view.message(f"error: {jobs_left}", "red")
            alerts.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._config_error is not None:  # printed once the view is closed
            print(f"areal_dta: {self._config_error}", file=sys.stderr)
        else:
            self._conclude()
        return self.exit_code

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signals.append(number)

    def _follow(self, supervisor: Supervisor, alerts: AlertReader) -> None:
        """Show events until the run ends, is stopped, or makes no progress."""
        stop_at: float | None = None
        handled_signals = 0
        while True:
            # 1. Show what the training process reports, and errors from the log.
            for event in supervisor.read_events(timeout_seconds=0.2):
                self._handle(event)
            # Once the run ends, processes complain about those that are gone already.
            for alert in alerts.read_new() if not self._ended else ():
                style = "red" if alert.is_error else "yellow"
                self._view.message(redact_text(alert.text), style)
            rotate(self.log_path, self._limits["max_log_megabytes"] * 1e6)
            # 2. The training process has exited: show its last events.
            if (code := supervisor.exit_code()) is not None:
                while events := supervisor.read_events(timeout_seconds=0.0):
                    for event in events:
                        self._handle(event)
                self._on_exit(code)
                return
            # 3. A signal, or no progress within the time limit, ends the run.
            now = time.monotonic()
            if len(self._signals) > handled_signals:
                if handled_signals:
                    return  # asked twice: do not wait for an orderly end
                handled_signals = len(self._signals)
                self._ended = True
                self.exit_code = 128 + self._signals[0]
                self._view.status("stopping (once more to kill at once)")
            elif now > self._deadline and not self._ended:
                self._fail(
                    f"no progress: waited {self._timeout_seconds:.0f} s for "
                    f"{self._waiting_for}; see the log, or raise {self._timeout_key}"
                )
            # 4. Leave it the grace period for an orderly end.
            if self._ended and stop_at is None:
                if self.exit_code != 0:
                    supervisor.request_stop()
                stop_at = now + self._limits["grace_seconds"]
            if stop_at is not None and now > stop_at:
                return

    def _handle(self, event: Event) -> None:
        match event:
            case {"kind": "status", "text": text}:
                self._view.status(text)
            case {"kind": "note", "text": text}:
                self._view.message(text)
            case {"kind": "start"}:
                self._view.message(f"log of all processes: {self.log_path}", "dim")
                self._view.set_run(event["num_steps"], event["algorithm"])
                self._note = event["note"]
                self._limits = event["launch"]
                self._recover_pointer = event["recover_pointer"]
                self._expect("workers and servers", "startup_timeout_seconds")
            case {"kind": "training", "first_step": first_step}:
                self._view.status("training")
                self._expect(f"step {first_step}", "step_timeout_seconds")
            case {"kind": "step"}:
                metrics = StepMetrics.from_record(event)
                self._view.step(metrics)
                self._expect(f"step {metrics.step + 1}", "step_timeout_seconds")
            case {"kind": "config_error", "text": text}:
                self.exit_code, self._ended = 2, True
                self._config_error = text
            case {"kind": "error", "text": text}:
                self._fail(text)
            case {"kind": "done"}:
                self._checkpoint = event["checkpoint"]
                if not self._ended:
                    self.exit_code, self._ended = 0, True
                    self._view.status("closing")

    def _expect(self, what: str, key: str) -> None:
        """Wait for the next sign of progress for at most ``launch.<key>`` seconds."""
        self._waiting_for, self._timeout_key = what, f"launch.{key}"
        self._timeout_seconds = self._limits[key]
        self._deadline = time.monotonic() + self._timeout_seconds

    def _fail(self, text: str) -> None:
        if not self._ended:
            self.exit_code, self._ended = 1, True
            self._view.message(f"error: {text}", "red")

    def _on_exit(self, code: int) -> None:
        if self._ended:
            return
        if code < 0:
            name = signal.Signals(-code).name
            self._fail(f"the training process was ended by {name}; out of memory?")
        else:
            self._fail(f"the training process ended early, exit code {code}")

    def _conclude(self) -> None:
        """Plot the run's curve, and print where its files are."""
        metrics_path = self.directory / "metrics.jsonl"
        steps = read_metrics(metrics_path) if metrics_path.exists() else []
        say = partial(self._console.print, soft_wrap=True, highlight=False)
        if steps:
            for name, path in draw_run(self.directory, self._note):
                say(f"{name:<13} {path}")
            say(f"metrics       {metrics_path}")
        if self._checkpoint is not None:
            say(f"checkpoint    {self._checkpoint}")
        if self.exit_code == 0 and steps:
            for summary in filter(None, (_summary(steps), _collector_summary(steps))):
                say(summary)
            if self._note:
                say(self._note, style="dim", soft_wrap=False)
        elif self.exit_code != 0:
            say(f"log           {self.log_path}")
            if self._recover_pointer != "":
                say(f"resume        {self._how_to_resume()}")

    def _how_to_resume(self) -> str:
        """Return the command that continues a run that failed."""
        if self._recover_pointer is None:
            return f"{self._command} recover.mode=on   (starts anew: it was off)"
        if not os.path.exists(self._recover_pointer):
            return f"{self._command}   (starts anew: nothing was saved yet)"
        return self._command


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse_args(argv)
        composed = compose(find_config(args.config), args.overrides)
        if args.dry_run:
            with _quiet():  # AReaL logs to standard output while it is imported
                from areal_dta.startup.dry_run import dry_run_text
                from areal_dta.startup.prepare import prepare

                text = dry_run_text(prepare(str(composed.file), args.overrides))
            print(text)
            return 0
        directory = run_dir(composed)
        with locked(directory):
            return Launcher(directory, Console()).run(composed.file, args.overrides)
    except ConfigError as e:
        print(f"areal_dta: {redact_text(str(e))}", file=sys.stderr)
        return 2


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what is written to stdout and stderr, unless an unexpected error is raised.

    On the level of file descriptors: libraries in C++ write there as well.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as hidden:
        for fd in (1, 2):
            os.dup2(hidden.fileno(), fd)
        is_crash = False
        try:
            yield
        except Exception as e:
            is_crash = not isinstance(e, ConfigError)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, fd)
                os.close(copy)
            if is_crash:
                hidden.seek(0)
                os.write(2, hidden.read())


def _collector_summary(steps: Sequence[StepMetrics]) -> str:
    """Describe the cost of collecting and planning, and the load of the ranks."""
    found = [m.collector for m in steps if "collector/share_of_step" in m.collector]
    if not found:
        return ""

    def mean(key: str) -> float:
        return sum(of_step.get(key, 0.0) for of_step in found) / len(found)

    return (
        f"collector     {mean('collector/share_of_step'):.1%} of a step beside it, "
        f"{mean('collector/wait_share_of_step'):.1%} waited for; "
        f"slowest rank {mean('plan/imbalance'):.3f}x mean"
    )


def _summary(steps: Sequence[StepMetrics], first: int = 5, last: int = 10) -> str:
    name, digits = "reward", 3
    values = [m.reward for m in steps if m.reward is not None]
    if not values:
        name, digits = "loss", 4
        values = [m.loss for m in steps if m.loss is not None]
    if len(values) < first + last:
        return ""
    start = sum(values[:first]) / first
    end = sum(values[-last:]) / last
    return (
        f"{name:<13} {start:.{digits}f} (first {first} steps) -> "
        f"{end:.{digits}f} (last {last}), {end - start:+.{digits}f}"
    )


if __name__ == "__main__":
    sys.exit(main())
