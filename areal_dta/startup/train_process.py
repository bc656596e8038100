"""The process that holds the trainer. Started by `areal_dta.launch`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from areal_dta.areal_fixes.loopback import bypass_proxies
from areal_dta.config.composed import ConfigError, first_line, shorten
from areal_dta.config.redaction import redact_text, redacted, secret_values
from areal_dta.config.server_options import TOKEN_VARIABLE
from areal_dta.report.step_metrics import MetricsWriter, StepMetrics
from areal_dta.startup.prepare import PreparedRun, prepare

if TYPE_CHECKING:
    from areal_dta.config.schema import DTAConfig
    from areal_dta.trainers.watched import WatchedTrainer


class EventWriter:
    """Thread-safe writer of events to the launcher: JSON lines over a pipe.

    Kinds: ``status`` (text), ``note`` (text), ``start`` (algorithm, num_steps, note,
    launch, recover_pointer), ``training`` (first_step), ``step`` (a step's record),
    ``config_error`` and ``error`` (text), ``done`` (checkpoint).
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # workers must not keep the pipe open
        self._fd = fd
        self._lock = threading.Lock()
        self.secrets: set[str] = set()
        """Values that no text may hold."""

    def send(self, kind: str, **values: Any) -> None:
        if "text" in values:
            values["text"] = redact_text(values["text"], self.secrets)
        data = (json.dumps({"kind": kind, **values}) + "\n").encode()
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


class Stopped(KeyboardInterrupt):
    """The launcher asked this process to end."""


def train(run: PreparedRun, events: EventWriter) -> None:
    """Train, and send what happens to the launcher."""
    from areal_dta.areal_fixes.slot_files import find_checkpoint
    from areal_dta.config.schema import DTAGRPOConfig
    from areal_dta.report.batch_sharing import batch_meter
    from areal_dta.trainers.batch_pages import pages_of

    config = run.config
    save_config(config, run.run_dir / "config.yaml")
    # What cannot be continued is refused before any process starts.
    checkpoint = find_checkpoint(config.recover)
    num_steps_done = 0 if checkpoint is None else checkpoint.num_steps
    if num_steps_done:
        events.send("note", text=f"continuing after step {num_steps_done}")
    metrics = MetricsWriter(run.run_dir / "metrics.jsonl", num_steps_done)

    def on_step(step: StepMetrics) -> None:
        metrics.write(step)
        events.send("step", **step.to_record())

    def on_death(message: str) -> None:
        events.send("error", text=message)
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGTERM)

    backends = [model.config.backend for model in run.resolved.models]
    if run.resolved.rollout is not None:
        backends.append(run.resolved.rollout.config.backend)
    events.send("status", text=f"starting {', '.join(backends)}")
    meter = batch_meter(config)
    trainer = trainer_class(config.algorithm)(
        run.resolved,
        run.train_dataset,
        run.valid_dataset,
        on_step=on_step,
        on_death=on_death,
        meter=meter,
        pages=pages_of(
            run.resolved,
            run.run_dir,
            num_steps_done,
            meter,
            lambda text: events.send("note", text=text),
        ),
        checkpoint=checkpoint,
    )
    try:
        events.send("training", first_step=trainer.num_steps_done + 1)
        if isinstance(config, DTAGRPOConfig):
            is_evaluated = run.valid_dataset is not None
            trainer.train(
                workflow=config.workflow,
                eval_workflow=config.workflow if is_evaluated else None,
                workflow_kwargs=config.workflow_arguments(config.gconfig),
                eval_workflow_kwargs=config.workflow_arguments(config.eval_gconfig),
                dynamic_filter_fn=config.group_filter or None,
            )
        else:
            trainer.train()
        events.send("done", checkpoint=trainer.last_checkpoint)
    finally:
        if config.scheduler.type == "local":
            trainer.flush()  # the launcher kills the workers: faster, and certain
        else:
            trainer.close()


def trainer_class(algorithm: str) -> type[WatchedTrainer]:
    """Return our trainer class for an algorithm."""
    if algorithm == "ppo":
        from areal_dta.trainers.ppo import DTATrainer

        return DTATrainer
    from areal_dta.trainers.supervised import TRAINERS

    return TRAINERS[algorithm]


def recover_pointer(config: DTAConfig) -> str | None:
    """Return the file that says that a run can be continued; None if it never can."""
    from areal_dta.areal_fixes.slot_files import POINTER, recover_root

    if config.recover.mode in ("disabled", "off"):
        return None
    return str(recover_root(config.recover) / POINTER)


def save_config(config: DTAConfig, path: Path) -> None:
    """Write the whole resolved configuration, AReaL's defaults included, no secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = redacted(dataclasses.asdict(config))
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(values)))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--event-fd", type=int, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    # Experiment loggers record the command line.
    sys.argv[1:] = [redact_text(argument) for argument in argv]
    # Workers, rollout servers and agents inherit both.
    bypass_proxies()
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(16))
    events = EventWriter(args.event_fd)

    def stop(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    try:
        events.send("status", text="loading AReaL and checking the configuration")
        run = prepare(args.config, args.overrides)
        events.secrets = secret_values(dataclasses.asdict(run.config))
        for note in run.notes:
            events.send("note", text=note)
        events.send(
            "start",
            algorithm=run.config.algorithm,
            num_steps=run.num_steps,
            note=run.config.note,
            launch=run.config.launch.limits(run.config.scheduler.type),
            recover_pointer=recover_pointer(run.config),
        )
        train(run, events)
    except ConfigError as e:
        events.send("config_error", text=str(e))
        return 2
    except Stopped:
        return 1
    except Exception as e:
        print(redact_text(traceback.format_exc(), events.secrets), file=sys.stderr)
        events.send("error", text=shorten(f"{type(e).__name__}: {first_line(e)}", 300))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait for workers would keep this process alive
