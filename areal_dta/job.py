"""The process that holds the trainer. Started by `areal_dta.launch`.

Importing AReaL takes seconds, so what can be refused without it is refused first.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from areal_dta.compose import (
    Composed,
    ConfigError,
    compose,
    find_config,
    one_line,
    run_dir,
)
from areal_dta.hardware import detect_hardware
from areal_dta.report.events import EventWriter
from areal_dta.report.metrics import MetricsWriter, StepMetrics

if TYPE_CHECKING:
    from areal_dta.config import DTAGRPOConfig


class Stopped(KeyboardInterrupt):
    """The launcher asked this process to end."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checked configuration with its data, ready to start."""

    config: DTAGRPOConfig
    composed: Composed
    tokenizer: Any
    train_dataset: Any
    valid_dataset: Any
    num_steps: int
    notes: tuple[str, ...]
    """For the user: what was chosen, and what was switched off."""

    @property
    def run_dir(self) -> Path:
        return run_dir(self.composed)


def prepare(config_name: str, overrides: Sequence[str]) -> Job:
    """Compose, check, and load the data. Starts nothing.

    Raises:
        ConfigError: it cannot work.
    """
    composed = compose(find_config(config_name), overrides)
    notes = []
    if composed.choices.get("hardware") == "auto":
        found = detect_hardware()
        notes.append(f"hardware=auto: {found.reason}, using hardware={found.choice}")
        composed = compose(composed.file, [*overrides, f"hardware={found.choice}"])
    if composed.choices.get("hardware") == "cpu":
        # AReaL compiles at import: seconds of start-up that nothing repays on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also where there is a GPU

    from areal_dta.config import actor_backend, rollout_backend, to_structured
    from areal_dta.preflight import check_config, gpu_note, num_steps

    config = to_structured(composed)
    notes += check_config(config, composed)
    notes += gpu_note(actor_backend(config), rollout_backend(config))
    tokenizer, train, valid = _load_data(config)
    return Job(
        config=config,
        composed=composed,
        tokenizer=tokenizer,
        train_dataset=train,
        valid_dataset=valid,
        num_steps=num_steps(config, len(train)),
        notes=tuple(notes),
    )


def run(job: Job, events: EventWriter) -> None:
    """Train, and send what happens."""
    from areal_dta.report.plan import batch_meter
    from areal_dta.trainer import DTATrainer

    config = job.config
    save_config(config, job.run_dir / "config.yaml")
    metrics = MetricsWriter(
        job.run_dir / "metrics.jsonl", resume=config.recover.mode in ("on", "auto")
    )

    def on_step(step: StepMetrics) -> None:
        metrics.write(step)
        events.send("step", **step.to_record())

    def on_death(message: str) -> None:
        events.send("error", text=message)
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGTERM)

    events.send(
        "status", text=f"starting {config.actor.backend} and {config.rollout.backend}"
    )
    trainer = DTATrainer(
        config,
        job.train_dataset,
        job.valid_dataset,
        on_step=on_step,
        on_death=on_death,
        meter=batch_meter(config),
    )
    try:
        events.send("status", text="training")
        trainer.train(
            workflow=config.workflow,
            eval_workflow=config.workflow if job.valid_dataset is not None else None,
            workflow_kwargs=workflow_kwargs(config, config.gconfig),
            eval_workflow_kwargs=workflow_kwargs(config, config.eval_gconfig),
        )
        events.send("done", checkpoint=trainer.last_checkpoint)
    finally:
        if config.scheduler.type == "local":
            trainer.flush()  # the launcher ends the workers, faster and for certain
        else:
            trainer.close()


def workflow_kwargs(config: DTAGRPOConfig, gconfig: Any) -> dict[str, Any]:
    """Arguments of the rollout workflow; import strings, since workers make it."""
    return {
        "reward_fn": config.reward_fn,
        "gconfig": gconfig,
        "tokenizer": config.tokenizer_path,
        "enable_thinking": config.enable_thinking,
    }


def save_config(config: DTAGRPOConfig, path: Path) -> None:
    """The whole resolved configuration, AReaL's defaults included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))


def brief(error: Exception, limit: int = 300) -> str:
    """One line about an error; AReaL's carry whole logs."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first.strip()}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _load_data(config: DTAGRPOConfig) -> tuple[Any, Any, Any]:
    from areal.utils.hf_utils import load_hf_tokenizer

    from areal_dta.preflight import load_object

    load = load_object(config.dataset_fn, "dataset_fn")
    tokenizer = load_hf_tokenizer(config.tokenizer_path or config.actor.path)
    datasets: list[Any] = []
    for key in ("train_dataset", "valid_dataset"):
        section = getattr(config, key)
        if section is None:
            datasets.append(None)
            continue
        try:
            dataset = load(
                section.path,
                split=section.split,
                tokenizer=tokenizer,
                max_length=section.max_length,
                **section.dataset_kwargs,
            )
        except (ValueError, TypeError) as e:
            raise ConfigError(f"{key}: {one_line(e)}") from e
        datasets.append(dataset)
    return tokenizer, datasets[0], datasets[1]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--event-fd", type=int, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    events = EventWriter(args.event_fd)

    def stop(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    try:
        events.send("status", text="loading AReaL and checking the configuration")
        job = prepare(args.config, args.overrides)
        for note in job.notes:
            events.send("note", text=note)
        events.send(
            "start",
            num_steps=job.num_steps,
            note=job.config.note,
            launch=dataclasses.asdict(job.config.launch),
        )
        run(job, events)
    except ConfigError as e:
        events.send("config_error", text=str(e))
        return 2
    except Stopped:
        return 1
    except Exception as e:
        traceback.print_exc()
        events.send("error", text=brief(e))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait for workers would keep this process alive
