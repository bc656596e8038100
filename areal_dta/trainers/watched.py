"""What each of our trainers adds to AReaL's: engines, processes, a record of each step.

Everything algorithmic stays AReaL's.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from areal.infra import RayScheduler
from areal.infra.scheduler.exceptions import SchedulerError
from areal.utils import logging, perf_tracer
from areal.utils.environ import is_single_controller
from areal.utils.saver import Saver

from areal_dta.areal_fixes.checkpoint_slots import (
    SlotRecoverHandler,
    slots_for_recovery,
)
from areal_dta.areal_fixes.local_scheduler import BoundedLocalScheduler
from areal_dta.areal_fixes.loggers import secrets_redacted, skip_disabled_swanlab
from areal_dta.areal_fixes.loopback import use_loopback, workers_on_loopback
from areal_dta.areal_fixes.registry import check_versions
from areal_dta.areal_fixes.slot_files import Checkpoint, disk_trouble
from areal_dta.areal_fixes.slurm_scheduler import BoundedSlurmScheduler
from areal_dta.areal_fixes.trainer_steps import saved_together, start_name_service
from areal_dta.collector.controllers import controller_of
from areal_dta.config.resolved import ResolvedRun
from areal_dta.engine import engine_class
from areal_dta.processes.liveness import LivenessMonitor, died, worker_probes
from areal_dta.processes.ray_cluster import start_ray
from areal_dta.processes.reaper import MARKER
from areal_dta.processes.slurm_jobs import JOBS_FILE, record_job, start_record
from areal_dta.report.batch_sharing import BatchMeter
from areal_dta.report.step_metrics import StepMetrics
from areal_dta.trainers.step_record import StepRecorder

if TYPE_CHECKING:
    from areal.api import Scheduler
    from areal.api.alloc_mode import ModelAllocation
    from datasets import Dataset

    from areal_dta.trainers.batch_pages import BatchPages


class WatchedTrainer:
    """Mixin; list it before AReaL's trainer so that its methods win.

    Args:
        checkpoint: what the run continues from, by `find_checkpoint`.
        on_step: called after each step with its record.
        on_death: called from another thread when a worker or server has died, with a
            message; it should end the run. By default that is only logged.
        meter: measures each batch as a prefix tree; None leaves those values out.

    Raises:
        ConfigError: a package has a version for which a repair was not made, or the
            checkpoint cannot be loaded.
    """

    batch_call: ClassVar[str]
    """Method of the actor's controller that returns the batch of a step or takes it."""

    config: Any
    actor: Any
    recover_handler: SlotRecoverHandler
    scheduler: Any
    stats_logger: Any
    saver: Any

    def __init__(
        self,
        run: ResolvedRun,
        train_dataset: Dataset | None = None,
        valid_dataset: Dataset | None = None,
        *,
        checkpoint: Checkpoint | None,
        on_step: Callable[[StepMetrics], None] | None = None,
        on_death: Callable[[str], None] | None = None,
        meter: BatchMeter | None = None,
        pages: BatchPages | None = None,
    ) -> None:
        if not is_single_controller():
            raise ValueError(
                f"AREAL_SPMD_MODE is set, but {type(self).__name__} is a single "
                "controller; unset it"
            )
        check_versions(run)
        self.on_death = on_death or logging.getLogger(type(self).__name__).error
        self.last_checkpoint: str | None = None
        self._recorder = StepRecorder(on_step, meter, pages)
        self._undos: list[Callable[[], None]] = []
        self.run = run.for_areal()
        config = self.run.config
        if config.launch.loopback and config.scheduler.type != "ray":
            self._undos.append(use_loopback())
            workers_on_loopback(pool.config for pool in self.run.worker_pools)
        swanlab_mode = config.stats_logger.swanlab.mode
        self._undos.append(skip_disabled_swanlab(swanlab_mode))
        self.num_steps_done = 0 if checkpoint is None else checkpoint.num_steps
        start_name_service(config)
        areal: Any = super()
        try:
            with secrets_redacted(), slots_for_recovery(checkpoint, self._more_engines):
                areal.__init__(config, train_dataset, valid_dataset)
        except BaseException:  # Ctrl-C as well: workers keep the process alive
            self.abort()
            raise

    def train(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.restart_clock()
        areal: Any = super()
        probes = worker_probes(self)
        try:
            with (
                LivenessMonitor(probes, self.on_death),
                self._recorder.watch_batches(self.actor, self.batch_call),
            ):
                areal.train(*args, **kwargs)
        except Exception as e:
            # A call may fail before the monitor has seen why.
            if dead := [name for name, is_dead in probes.items() if is_dead()]:
                raise RuntimeError(died(" and ".join(dead))) from e
            raise

    def close(self) -> None:
        areal: Any = super()
        areal.close()
        self._undo()

    def flush(self) -> None:
        """Finish checkpoints and AReaL's loggers; workers are left as they are."""
        if hasattr(self, "saver"):
            self.saver.finalize()
        if hasattr(self, "stats_logger"):
            self.stats_logger.close()
        perf_tracer.save(force=True)

    def abort(self) -> None:
        """End at once, without asking workers that may be gone: kill them."""
        try:
            self.flush()
        finally:
            if getattr(self, "scheduler", None) is not None:
                self.scheduler.delete_workers()
            self._undo()

    def more_stats(self) -> Mapping[str, float]:
        """Return statistics to commit beside those that AReaL's trainer collects."""
        return {}

    def _more_engines(self) -> Mapping[str, Any]:
        """Return engines to restore beside the actor, by their names in checkpoints."""
        return {}

    def _undo(self) -> None:
        while self._undos:
            self._undos.pop(0)()

    def _init_scheduler(self) -> Scheduler:
        config = self.config
        timeout = config.launch.worker_timeout_seconds
        if config.scheduler.type == "slurm":
            root = (config.cluster.fileroot, config.experiment_name, config.trial_name)
            jobs = Path(*root, JOBS_FILE)
            jobs.parent.mkdir(parents=True, exist_ok=True)
            comment = start_record(jobs, os.environ.get(MARKER) or uuid.uuid4().hex)
            on_job = partial(record_job, jobs)
            return BoundedSlurmScheduler(config, comment, on_job, timeout)
        if config.scheduler.type == "ray":
            # as AReaL asks Ray for them
            num_cpus = sum(
                pool.backend.num_ranks * pool.config.scheduling_spec[0].cpu
                for pool in self.run.worker_pools
            )
            self._undos.append(start_ray(num_cpus, config.launch.loopback))
            return RayScheduler(exp_config=config, startup_timeout=timeout)
        return BoundedLocalScheduler(exp_config=config, startup_timeout=timeout)

    def _create_engine(
        self, kind: str, config: Any, alloc: ModelAllocation
    ) -> Any | None:
        """Return a controller of one of our engines, or None where AReaL's serves."""
        cls = engine_class(kind, config.engine or alloc.backend, config.attn_impl)
        if cls is None:
            return None
        controller = controller_of(cls, config, self.scheduler)
        controller.create_process_group(parallel_strategy=alloc.parallel)
        return controller

    def _save_hf(self, epoch: int, epoch_step: int, global_step: int) -> None:
        areal: Any = super()
        root = Saver.get_model_save_root(
            self.config.experiment_name,
            self.config.trial_name,
            self.config.cluster.fileroot,
        )
        name = f"epoch{epoch}epochstep{epoch_step}globalstep{global_step}"
        path = os.path.join(root, name)
        try:
            with saved_together(self.saver):
                areal._save_hf(epoch, epoch_step, global_step)
        except (OSError, SchedulerError) as error:
            if (trouble := disk_trouble(error)) is None:
                raise
            shutil.rmtree(path, ignore_errors=True)  # half of a checkpoint
            logger = logging.getLogger(type(self).__name__)
            logger.warning(f"{trouble}: the checkpoint {path} could not be written")
        if os.path.isdir(path):
            self.last_checkpoint = path

    def _export_and_commit_stats(
        self, epoch: int, epoch_step: int, global_step: int
    ) -> None:
        areal: Any = super()
        with self._recorder.step(global_step + 1, self.stats_logger, self.more_stats):
            areal._export_and_commit_stats(epoch, epoch_step, global_step)
        self.recover_handler.publish()  # a run that continues from it lacks no metrics
