"""AReaL's trainers, by their own names, for scripts that are their own launcher.

A script in AReaL's style takes the trainer and its configuration class from
`areal_dta` instead of from AReaL; all else stays as it was (docs/migrate.md). What the
launcher and its training process do around a trainer is done here: the checks, the lock
of the run's directory, its records, time limits, and the end of all processes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from areal.utils import logging

from areal_dta.areal_fixes.loopback import bypass_proxies
from areal_dta.areal_fixes.slot_files import find_checkpoint
from areal_dta.config.composed import ConfigError
from areal_dta.config.resolved import resolve
from areal_dta.config.schema import DTADPOConfig as DPOConfig
from areal_dta.config.schema import DTAGRPOConfig as GRPOConfig
from areal_dta.config.schema import DTARWConfig as RWConfig
from areal_dta.config.schema import DTASFTConfig as SFTConfig
from areal_dta.config.server_options import TOKEN_VARIABLE
from areal_dta.processes.reaper import kill_marked
from areal_dta.processes.run_lock import children_end_with_run, locked
from areal_dta.processes.watchdog import Watchdog
from areal_dta.report.batch_sharing import batch_meter
from areal_dta.report.plot import draw_run
from areal_dta.report.step_metrics import MetricsWriter, StepMetrics
from areal_dta.startup.checks import check_run, num_steps
from areal_dta.startup.compose import register_resolvers
from areal_dta.startup.train_process import save_config
from areal_dta.trainers.batch_pages import pages_of
from areal_dta.trainers.ppo import DTATrainer
from areal_dta.trainers.supervised import DTADPOTrainer, DTARWTrainer, DTASFTTrainer

__all__ = [
    *("DPOConfig", "DPOTrainer", "GRPOConfig", "PPOConfig", "PPOTrainer"),
    *("RWConfig", "RWTrainer", "SFTConfig", "SFTTrainer"),
]

PPOConfig = GRPOConfig  # AReaL has two names for one class as well
register_resolvers()  # of our YAML files: a script reads one after its imports

logger = logging.getLogger("OwnScript")


class OwnScript:
    """Mixin; list it before one of our trainers. Use it as a context manager.

    Args:
        config: of `config_class`, or a subclass of it.
        train_dataset: as AReaL's trainer takes it.
        valid_dataset: likewise.
        on_step: called after each step with its record, also a line of
            ``metrics.jsonl``.

    Raises:
        ConfigError: the configuration cannot work, or another run uses its directory.
        RuntimeError: a worker or server has died, or a time limit of ``config.launch``
            is over; here, or in ``train``.
    """

    config_class: ClassVar[type[Any]]
    abort: Callable[[], None]
    last_checkpoint: str | None

    def __init__(
        self,
        config: Any,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        *,
        on_step: Callable[[StepMetrics], None] | None = None,
    ) -> None:
        name, wanted = type(config).__name__, self.config_class
        if not isinstance(config, wanted):
            public = wanted.__name__.removeprefix("DTA")
            raise ConfigError(
                f"{type(self).__name__} got {type(config).__module__}.{name}; expected "
                f"areal_dta.{public}, or a subclass of it: "
                f"from areal_dta import {public}"
            )
        # Refuse what cannot work before any process starts.
        run = resolve(config)
        for note in check_run(run):
            logger.info(note)
        if train_dataset is not None and hasattr(train_dataset, "__len__"):
            num_steps(config, len(train_dataset))
        checkpoint = find_checkpoint(config.recover)
        self._directory = Path(
            config.cluster.fileroot, config.experiment_name, config.trial_name
        )
        self._limits = config.launch.limits(config.scheduler.type)
        self._note, self._user_on_step = config.note, on_step
        # Prepare the environment, which workers, servers and agents inherit.
        bypass_proxies()
        os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(16))
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(locked(self._directory))
            marker = enter(children_end_with_run(self._directory))
            save_config(config, self._directory / "config.yaml")
            num_done = 0 if checkpoint is None else checkpoint.num_steps
            metrics = self._directory / "metrics.jsonl"
            self._metrics = MetricsWriter(metrics, num_done)
            stack.callback(self._metrics.close)
            self._watchdog = Watchdog(
                partial(kill_marked, marker), self._limits["grace_seconds"]
            )
            stack.callback(self._watchdog.close)
            self._at_end = stack.pop_all()
        # Start workers and servers.
        logger.info(f"records of the run: {self._directory}")
        self._expect("workers and servers", "startup_timeout_seconds")
        ours: Any = super()
        try:
            with self._watchdog.watching():
                ours.__init__(
                    run,
                    train_dataset,
                    valid_dataset,
                    checkpoint=checkpoint,
                    on_step=self._record,
                    on_death=self._watchdog.stop,
                    meter=(meter := batch_meter(config)),
                    pages=pages_of(
                        run, self._directory, num_done, meter, logger.warning
                    ),
                )
        except BaseException:
            self._at_end.close()
            raise

    def train(self, *args: Any, **kwargs: Any) -> None:
        """Train as AReaL's trainer does, with the same arguments."""
        ours: Any = super()
        self._expect("the first step", "step_timeout_seconds")
        with self._watchdog.watching():
            ours.train(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:  # workers may be gone: do not ask them to end
            try:
                self.abort()
            finally:
                self._end()

    def close(self) -> None:
        ours: Any = super()
        try:
            ours.close()
        finally:
            self._end()

    def _record(self, step: StepMetrics) -> None:
        self._metrics.write(step)
        self._expect(f"step {step.step + 1}", "step_timeout_seconds")
        if self._user_on_step is not None:
            self._user_on_step(step)

    def _expect(self, what: str, key: str) -> None:
        self._watchdog.expect(what, self._limits[key], f"launch.{key}")

    def _end(self) -> None:
        self._at_end.close()
        for name, path in draw_run(self._directory, self._note):
            logger.info(f"{name}: {path}")
        if self.last_checkpoint is not None:
            logger.info(f"checkpoint: {self.last_checkpoint}")


class PPOTrainer(OwnScript, DTATrainer):
    """`areal.PPOTrainer` on prefix trees."""

    config_class = GRPOConfig


class SFTTrainer(OwnScript, DTASFTTrainer):
    """`areal.SFTTrainer` on prefix trees."""

    config_class = SFTConfig


class DPOTrainer(OwnScript, DTADPOTrainer):
    """`areal.DPOTrainer` on prefix trees."""

    config_class = DPOConfig


class RWTrainer(OwnScript, DTARWTrainer):
    """`areal.RWTrainer` on prefix trees."""

    config_class = RWConfig
