"""What our trainers add to AReaL's: our engines, our processes, a record of each step.

Everything algorithmic stays AReaL's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from areal.api.alloc_mode import ModelAllocation
from areal.infra import RayScheduler
from areal.utils import logging, name_resolve, names, perf_tracer, stats_tracker
from areal.utils.environ import is_single_controller
from areal.utils.saver import Saver

from areal_dta.areal_fixes.loopback import LOOPBACK_ENV, use_loopback
from areal_dta.collector.dispatch import controller_of
from areal_dta.config.resolved import ResolvedRun
from areal_dta.config.schema import DTAConfig
from areal_dta.engine import engine_class
from areal_dta.processes.liveness import (
    LivenessMonitor,
    Probe,
    died,
    port_probe,
    process_probe,
)
from areal_dta.processes.ray_cluster import start_ray
from areal_dta.processes.scheduler import BoundedLocalScheduler
from areal_dta.report.batch_sharing import BatchMeter
from areal_dta.report.step_metrics import BatchShape, StepMetrics, step_metrics

if TYPE_CHECKING:
    from areal.api import Scheduler
    from datasets import Dataset

AREAL_WORKER = "python -m areal.infra.rpc.rpc_server"
LOOPBACK_WORKER = "python -m areal_dta.processes.worker"

# Attributes of AReaL's trainers that hold controllers, and through them processes.
_CONTROLLERS = ("actor", "critic", "ref", "teacher", "rollout", "eval_rollout")


class WatchedTrainer:
    """Stands before one of AReaL's trainers among the bases of one of ours.

    Args:
        on_step: called after each step with its record.
        on_death: called from another thread when a worker or server has died, with a
            message; it should end the run. By default that is only logged.
        meter: measures each batch as a prefix tree; None leaves those values out.
    """

    batch_call: ClassVar[str]
    """Method of the actor's controller that returns the batch of a step or takes it."""

    config: Any
    actor: Any
    scheduler: Any
    stats_logger: Any
    saver: Any

    def __init__(
        self,
        run: ResolvedRun,
        train_dataset: Dataset | None = None,
        valid_dataset: Dataset | None = None,
        *,
        on_step: Callable[[StepMetrics], None] | None = None,
        on_death: Callable[[str], None] | None = None,
        meter: BatchMeter | None = None,
    ) -> None:
        if not is_single_controller():
            raise ValueError(
                f"AREAL_SPMD_MODE is set, but {type(self).__name__} is a single "
                "controller; unset it"
            )
        self.on_step = on_step
        self.on_death = on_death or logging.getLogger(type(self).__name__).error
        self.meter = meter
        self.last_checkpoint: str | None = None
        self._batch_shape: BatchShape | None = None
        self._step_started = time.monotonic()
        self._undo_loopback: Callable[[], None] | None = None
        self._stop_ray: Callable[[], None] | None = None
        self.run = run.for_areal()
        config = self.run.config
        if config.launch.loopback and config.scheduler.type == "local":
            self._undo_loopback = use_loopback()
            _listen_on_loopback(self.run)
        _start_name_service(config)
        areal: Any = super()
        try:
            areal.__init__(config, train_dataset, valid_dataset)
        except BaseException:  # Ctrl-C as well: workers keep the process alive
            self.abort()
            raise

    def train(self, *args: Any, **kwargs: Any) -> None:
        self._step_started = time.monotonic()
        areal: Any = super()
        probes = self._probes()
        try:
            with LivenessMonitor(probes, self.on_death), self._watch_batches():
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

    def _undo(self) -> None:
        for undo in (self._undo_loopback, self._stop_ray):
            if undo is not None:
                undo()
        self._undo_loopback = self._stop_ray = None

    def more_stats(self) -> Mapping[str, float]:
        """Statistics to commit beside those that AReaL's trainer collects."""
        return {}

    def _init_scheduler(self) -> Scheduler:
        if self.config.scheduler.type == "ray":
            num_cpus = _required_cpus(self.run)
            self._stop_ray = start_ray(num_cpus, self.config.launch.loopback)
            return RayScheduler(
                exp_config=self.config,
                startup_timeout=self.config.launch.worker_timeout_seconds,
            )
        if self.config.scheduler.type != "local":
            areal: Any = super()
            return areal._init_scheduler()
        return BoundedLocalScheduler(
            exp_config=self.config,
            startup_timeout=self.config.launch.worker_timeout_seconds,
        )

    def _create_engine(
        self, kind: str, config: Any, alloc: ModelAllocation
    ) -> Any | None:
        """A controller of one of our engines, or None where AReaL's own serves."""
        engine = config.engine or alloc.backend
        cls = engine_class(kind, engine, config.attn_impl)
        if cls is None:
            return None
        controller = controller_of(cls, config, self.scheduler)
        controller.create_process_group(parallel_strategy=alloc.parallel)
        return controller

    def _save_hf(self, epoch: int, epoch_step: int, global_step: int) -> None:
        areal: Any = super()
        # AReaL 1.0.4 asks once for the actor and once for the critic whether it is
        # time, and each question counts as a step: they would be saved in turn.
        with wrapped(self.saver.freq_ctl, "check", answered_once):
            areal._save_hf(epoch, epoch_step, global_step)
        root = Saver.get_model_save_root(
            self.config.experiment_name,
            self.config.trial_name,
            self.config.cluster.fileroot,
        )
        name = f"epoch{epoch}epochstep{epoch_step}globalstep{global_step}"
        if os.path.isdir(path := os.path.join(root, name)):
            self.last_checkpoint = path

    def _export_and_commit_stats(
        self, epoch: int, epoch_step: int, global_step: int
    ) -> None:
        shape = self._batch_shape
        if shape is not None:  # so that AReaL's own loggers get them as well
            stats_tracker.scalar(
                **{
                    "batch/sequence_tokens": shape.sequence_tokens,
                    "batch/tree_tokens": shape.tree_tokens,
                    "batch/sharing_ratio": shape.sharing_ratio,
                }
            )
        areal: Any = super()
        with _commits(self.stats_logger, self.more_stats) as committed:
            areal._export_and_commit_stats(epoch, epoch_step, global_step)
        now = time.monotonic()
        metrics = step_metrics(
            global_step + 1, committed, shape, now - self._step_started
        )
        self._step_started = now
        if self.on_step is not None:
            self.on_step(metrics)

    def _watch_batches(self) -> AbstractContextManager[None]:
        """Measure each batch on its way to the trainer."""
        return wrapped(self.actor, self.batch_call, self._measured)

    def _measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._measure(batch)
            return call(batch, *args, **kwargs)

        return measured

    def _measure(self, batch: Any) -> None:
        self._batch_shape = self.meter.measure(batch) if self.meter else None

    def _probes(self) -> dict[str, Probe]:
        """One for each process of this run that may die."""
        probes: dict[str, Probe] = {}
        for name in _CONTROLLERS:
            controller = getattr(self, name, None)
            workers = [*getattr(controller, "workers", [])]
            workers += getattr(controller, "proxy_workers", [])
            for worker in workers:
                port = int(worker.worker_ports[0])
                probes[f"worker {worker.id}"] = port_probe(worker.ip, port)
        for role in ("rollout", "teacher"):
            servers = getattr(getattr(self, role, None), "server_infos", [])
            for rank, server in enumerate(servers):
                name = f"{role} server {rank}"
                probes[name] = port_probe(server.host, int(server.port))
        if isinstance(self.scheduler, BoundedLocalScheduler):
            for name, process in self.scheduler.worker_processes().items():
                probes[f"worker {name}"] = process_probe(process)
        # Not every scheduler's workers listen on the port that they are given.
        return {name: probe for name, probe in probes.items() if not probe()}


@contextmanager
def wrapped(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a method of one object until left."""
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)


def answered_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls once, and gives the same answer from then on."""
    answers: list[Any] = []

    def answered(*args: Any, **kwargs: Any) -> Any:
        if not answers:
            answers.append(call(*args, **kwargs))
        return answers[0]

    return answered


@contextmanager
def _commits(
    stats_logger: Any, more: Callable[[], Mapping[str, float]]
) -> Iterator[dict[str, float]]:
    """Collect what is committed to AReaL's statistics logger meanwhile, with more."""
    committed: dict[str, float] = {}
    commit = stats_logger.commit

    def tee(epoch: int, step: int, global_step: int, data: Any) -> None:
        items = [data] if isinstance(data, dict) else list(data)
        items[0] = {**items[0], **more()}
        for item in items:
            committed.update(item)
        commit(epoch, step, global_step, items)

    stats_logger.commit = tee
    try:
        yield committed
    finally:
        stats_logger.commit = commit


def _required_cpus(run: ResolvedRun) -> int:
    """Return the number of CPUs of all workers, as AReaL asks Ray for them."""
    return sum(
        pool.backend.num_ranks * pool.config.scheduling_spec[0].cpu
        for pool in run.worker_pools
    )


def _start_name_service(config: DTAConfig) -> None:
    """Set up AReaL's name service, empty; not all of its schedulers do."""
    os.makedirs(config.cluster.name_resolve.nfs_record_root, exist_ok=True)
    name_resolve.reconfigure(config.cluster.name_resolve)
    trial = names.trial_root(config.experiment_name, config.trial_name)
    name_resolve.clear_subtree(trial)


def _listen_on_loopback(run: ResolvedRun) -> None:
    for pool in run.worker_pools:
        for spec in pool.config.scheduling_spec:
            if spec.cmd == AREAL_WORKER:
                spec.cmd = LOOPBACK_WORKER
            spec.env_vars = {**LOOPBACK_ENV, **spec.env_vars}
