"""AReaL's PPO trainer with the tree engine, the embedded server, and our report.

Everything algorithmic stays AReaL's: this subclass chooses classes for the backends
that AReaL does not know, watches its processes, and records each step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from areal.infra import RolloutController
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils import logging, name_resolve, names, perf_tracer, stats_tracker
from areal.utils.environ import is_single_controller
from areal.utils.saver import Saver

from areal_dta.config import DTAGRPOConfig, DTAPPOActorConfig, translate_backends
from areal_dta.processes.liveness import (
    LivenessMonitor,
    Probe,
    died,
    port_probe,
    process_probe,
)
from areal_dta.processes.loopback import LOOPBACK_ENV, use_loopback
from areal_dta.processes.scheduler import BoundedLocalScheduler
from areal_dta.report.batch import BatchMeter, BatchShape
from areal_dta.report.collect import step_metrics
from areal_dta.report.metrics import StepMetrics
from areal_dta.weight_sync import load_when_saved

if TYPE_CHECKING:
    from areal.api import Scheduler
    from areal.api.alloc_mode import ModelAllocation
    from datasets import Dataset

logger = logging.getLogger("DTATrainer")

AREAL_WORKER = "python -m areal.infra.rpc.rpc_server"
LOOPBACK_WORKER = "python -m areal_dta.processes.worker"


class DTATrainer(PPOTrainer):
    """Trains as `PPOTrainer` does; use as a context manager.

    Args:
        on_step: called after each step with its record.
        on_death: called from another thread when a worker or server has died, with a
            message; it should end the run. By default that is only logged.
        meter: measures each batch as a prefix tree; None leaves those values out.
    """

    config: DTAGRPOConfig

    def __init__(
        self,
        config: DTAGRPOConfig,
        train_dataset: Dataset | None = None,
        valid_dataset: Dataset | None = None,
        *,
        on_step: Callable[[StepMetrics], None] | None = None,
        on_death: Callable[[str], None] | None = None,
        meter: BatchMeter | None = None,
    ) -> None:
        if not is_single_controller():
            raise ValueError(
                "AREAL_SPMD_MODE is set, but DTATrainer is a single controller; "
                "unset it"
            )
        self.on_step = on_step
        self.on_death = on_death or logger.error
        self.meter = meter
        self.last_checkpoint: str | None = None
        self._batch_shape: BatchShape | None = None
        self._step_started = time.monotonic()
        self._undo_loopback: Callable[[], None] | None = None
        config = translate_backends(config)
        if config.launch.loopback and config.scheduler.type == "local":
            self._undo_loopback = use_loopback()
            _listen_on_loopback(config)
        _start_name_service(config)
        try:
            super().__init__(config, train_dataset, valid_dataset)
        except BaseException:  # Ctrl-C as well: workers keep the process alive
            self.abort()
            raise

    def train(self, *args: Any, **kwargs: Any) -> None:
        self._step_started = time.monotonic()
        probes = self._probes()
        try:
            with (
                LivenessMonitor(probes, self.on_death),
                self._watch_batches(),
            ):
                super().train(*args, **kwargs)
        except Exception as e:
            # A call may fail before the monitor has seen why.
            if dead := [name for name, is_dead in probes.items() if is_dead()]:
                raise RuntimeError(died(" and ".join(dead))) from e
            raise

    def close(self) -> None:
        super().close()
        if self._undo_loopback is not None:
            self._undo_loopback()

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
            if self._undo_loopback is not None:
                self._undo_loopback()

    def _init_scheduler(self) -> Scheduler:
        if self.config.scheduler.type != "local":
            return super()._init_scheduler()
        return BoundedLocalScheduler(
            exp_config=self.config,
            startup_timeout=self.config.launch.worker_timeout_seconds,
        )

    def _create_train_engine(
        self, actor_config: DTAPPOActorConfig, alloc: ModelAllocation
    ) -> Any:
        cls: Any
        engine = getattr(actor_config, "engine", "") or alloc.backend
        if engine == "dta":
            from areal_dta.engine import DTAPPOActor as cls
        elif engine == "fsdp" and _sees_packed_neighbours(actor_config):
            from areal_dta.engine import DensePPOActor as cls
        else:
            return super()._create_train_engine(actor_config, alloc)
        actor = cls.as_controller(actor_config, self.scheduler)
        actor.create_process_group(parallel_strategy=alloc.parallel)
        return actor

    def _init_rollout(
        self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None
    ) -> Any:
        if is_eval and self.valid_dataloader is None:
            return None  # nothing to evaluate: saves a process
        if rollout_config.engine == "local":
            controller = self._init_local_rollout(deepcopy(rollout_config), is_eval)
        else:
            controller = super()._init_rollout(rollout_config, is_eval, lora_path)
        if isinstance(controller, RolloutController) and not is_eval:
            load_when_saved(controller)
        return controller

    def _init_local_rollout(self, config: Any, is_eval: bool) -> Any:
        from areal.api.cli_args import SchedulingStrategy, SchedulingStrategyType

        from areal_dta.rollout.local import LocalEngine

        controller = LocalEngine.as_controller(config, self.scheduler)
        kwargs: dict[str, Any] = {"role": "rollout"}
        if is_eval:  # as AReaL does it: no staleness control, the same servers
            config.max_head_offpolicyness = int(1e12)
            config.scheduling_strategy = SchedulingStrategy(
                type=SchedulingStrategyType.colocation, target="rollout"
            )
            kwargs = {"role": "eval-rollout", "server_infos": self.rollout.server_infos}
        controller.initialize(server_args=self.config.local.build_args(), **kwargs)
        return controller

    def _save_hf(self, epoch: int, epoch_step: int, global_step: int) -> None:
        super()._save_hf(epoch, epoch_step, global_step)
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
        with _captured_commits(self.stats_logger) as committed:
            super()._export_and_commit_stats(epoch, epoch_step, global_step)
        now = time.monotonic()
        metrics = step_metrics(
            global_step + 1, committed, shape, now - self._step_started
        )
        self._step_started = now
        if self.on_step is not None:
            self.on_step(metrics)

    @contextmanager
    def _watch_batches(self) -> Iterator[None]:
        """Measure each batch on its way from the rollouts to the trainer."""
        prepare_batch = self.actor.prepare_batch

        def measured(*args: Any, **kwargs: Any) -> Any:
            batch = prepare_batch(*args, **kwargs)
            self._batch_shape = self.meter.measure(batch) if self.meter else None
            return batch

        self.actor.prepare_batch = measured
        try:
            yield
        finally:
            del self.actor.prepare_batch

    def _probes(self) -> dict[str, Probe]:
        """One for each process of this run that may die."""
        probes: dict[str, Probe] = {}
        controllers = (
            self.actor,
            self.critic,
            self.ref,
            self.rollout,
            self.eval_rollout,
        )
        for controller in controllers:
            for worker in getattr(controller, "workers", []):
                port = int(worker.worker_ports[0])
                probes[f"worker {worker.id}"] = port_probe(worker.ip, port)
        for rank, server in enumerate(getattr(self.rollout, "server_infos", [])):
            probes[f"rollout server {rank}"] = port_probe(server.host, int(server.port))
        if isinstance(self.scheduler, BoundedLocalScheduler):
            for name, process in self.scheduler.worker_processes().items():
                probes[f"worker {name}"] = process_probe(process)
        # Not every scheduler's workers listen on the port that they are given.
        return {name: probe for name, probe in probes.items() if not probe()}


@contextmanager
def _captured_commits(stats_logger: Any) -> Iterator[dict[str, float]]:
    """Collect what is committed to AReaL's statistics logger meanwhile."""
    committed: dict[str, float] = {}
    commit = stats_logger.commit

    def tee(epoch: int, step: int, global_step: int, data: Any) -> None:
        for item in [data] if isinstance(data, dict) else data:
            committed.update(item)
        commit(epoch, step, global_step, data)

    stats_logger.commit = tee
    try:
        yield committed
    finally:
        stats_logger.commit = commit


def _start_name_service(config: DTAGRPOConfig) -> None:
    """Set up AReaL's name service, empty; not all of its schedulers do."""
    os.makedirs(config.cluster.name_resolve.nfs_record_root, exist_ok=True)
    name_resolve.reconfigure(config.cluster.name_resolve)
    trial = names.trial_root(config.experiment_name, config.trial_name)
    name_resolve.clear_subtree(trial)


def _sees_packed_neighbours(actor_config: DTAPPOActorConfig) -> bool:
    """Whether AReaL's dense engine would let packed sequences attend to one another.

    Only flash attention takes the boundaries that it passes; sdpa and eager ignore
    them without a word.
    """
    return actor_config.attn_impl in ("sdpa", "eager")


def _listen_on_loopback(config: DTAGRPOConfig) -> None:
    sections: list[Any] = [config.actor, config.ref, config.critic, config.rollout]
    for section in sections:
        for spec in section.scheduling_spec if section is not None else ():
            if spec.cmd == AREAL_WORKER:
                spec.cmd = LOOPBACK_WORKER
            spec.env_vars = {**LOOPBACK_ENV, **spec.env_vars}
