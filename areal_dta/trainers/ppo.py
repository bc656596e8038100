"""AReaL's PPO trainer with the tree engine, our rollouts, recovery and report.

Everything algorithmic stays AReaL's: this subclass chooses classes for the backends
that AReaL does not know, and has rollouts collected as they arrive, and planned.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from areal.api.cli_args import TrainDatasetConfig
from areal.infra import RolloutController
from areal.infra.data_service.rdataset import RDataset
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils import logging, stats_tracker

from areal_dta.areal_fixes.agent_proxy import our_proxy
from areal_dta.areal_fixes.registry import wrapped
from areal_dta.areal_fixes.rollout_workers import load_when_saved
from areal_dta.areal_fixes.trainer_steps import (
    critic_stats,
    free_results,
    staleness_control_at_controller,
    teacher_cleared,
    with_secret_key,
)
from areal_dta.collector.collector import Collector
from areal_dta.collector.controllers import DispatchController
from areal_dta.collector.planned_batch import PlannedBatch
from areal_dta.collector.planner import BatchPlanner
from areal_dta.collector.prompt_issuer import PromptIssuer
from areal_dta.collector.rejections import RejectionWatch
from areal_dta.collector.rollout_hook import CollectorHook
from areal_dta.config.resolved import ResolvedRun
from areal_dta.config.schema import DTAGRPOConfig, DTAPPOActorConfig, DTAPPOCriticConfig
from areal_dta.config.server_options import TOKEN_VARIABLE
from areal_dta.report.logprob_gap import logprob_gap
from areal_dta.schedule import FlopModel
from areal_dta.schedule.block_features import SAMPLE_FLOATS
from areal_dta.trainers.waits import WaitMeter
from areal_dta.trainers.watched import WatchedTrainer

if TYPE_CHECKING:
    from areal.api.alloc_mode import ModelAllocation

logger = logging.getLogger("DTATrainer")


class DTATrainer(WatchedTrainer, PPOTrainer):
    """Trains as `PPOTrainer` does; use as a context manager.

    Rollouts are collected and planned where the actor is one of our engines: AReaL's
    own controllers cannot use a plan.
    """

    batch_call = "prepare_batch"
    config: DTAGRPOConfig
    critic: Any
    teacher: Any
    hook: CollectorHook | None = None
    _logprob_gap: Mapping[str, float] | None = None
    _waits: WaitMeter | None = None
    _plan_seconds = 0.0

    def __init__(self, run: ResolvedRun, *args: Any, **kwargs: Any) -> None:
        super().__init__(with_secret_key(run), *args, **kwargs)
        self._since = time.monotonic()
        if isinstance(self.rollout, RolloutController):
            self._waits = WaitMeter()
        if isinstance(self.actor, DispatchController) and isinstance(
            self.rollout, RolloutController
        ):
            try:
                self._start_collecting(self.rollout)
            except BaseException:  # workers keep the process alive
                self.abort()
                raise

    def train(self, workflow: Any = None, *args: Any, **kwargs: Any) -> None:
        if workflow is not None and self._requires_proxy_workflow(workflow):
            self._ensure_proxy_started()  # before it is looked up who may die
        teacher = self.config.teacher
        trained = teacher is not None and teacher.engine_type == "train"
        others = self.critic, self.ref
        with (
            nullcontext()
            if self._waits is None
            else self._waits.watch(self.rollout, self.actor, *others),
            wrapped(self.actor, "compute_logp", self._compared),
            teacher_cleared(self.actor, self.teacher if trained else None),
        ):
            super().train(workflow, *args, **kwargs)

    def close(self) -> None:
        if self.hook is not None:
            self.hook.close()
        super().close()

    def more_stats(self) -> Mapping[str, float]:
        gap, self._logprob_gap = self._logprob_gap, None
        stats = {**critic_stats(self.critic), **(gap or {})}
        if self._waits is not None:
            stats |= self._waits.take_metrics(self._plan_seconds)
        return stats

    # The step: compare logprobs, and say what the collector did.

    def _compared(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Compare the trainer's logprobs with the rollout server's on the way."""

        def compared(batch: Any, *args: Any, **kwargs: Any) -> Any:
            recomputed = call(batch, *args, **kwargs)
            version = self.actor.get_version()
            self._logprob_gap = logprob_gap(batch, recomputed, version)
            return recomputed

        return compared

    def _export_and_commit_stats(
        self, epoch: int, epoch_step: int, global_step: int
    ) -> None:
        if self.hook is not None:
            stats = self._collector_stats(self.hook, self.actor)
            stats_tracker.scalar(**stats)
        super()._export_and_commit_stats(epoch, epoch_step, global_step)

    def _collector_stats(
        self, hook: CollectorHook, actor: DispatchController
    ) -> Mapping[str, float]:
        """Take in the step's measured blocks, and return the step's metrics."""
        now = time.monotonic()
        step_seconds, self._since = now - self._since, now
        collector, planner = hook.collector, actor.planner
        samples = np.array(actor.take_block_samples(), np.float64)
        samples = samples.reshape(-1, SAMPLE_FLOATS)
        if self.config.collector.refit_costs:
            planner.observe(samples)
        collector.add_seconds("meter", self._recorder.take_meter_seconds())
        stats = {**collector.take_metrics(step_seconds), **hook.traffic.take_metrics()}
        self._plan_seconds = stats["collector/wait_seconds"]
        for controller in (actor, self.critic, self.ref):
            if isinstance(controller, DispatchController):
                for key, value in controller.take_dispatch_metrics().items():
                    stats[key] = stats.get(key, 0.0) + value
        seconds = planner.seconds(collector.total)
        stats["collector/waiting_predicted_seconds"] = seconds
        stats["plan/measured_blocks"] = planner.num_samples()
        # What the executor itself took of the training, over all ranks.
        stats["plan/executor_seconds"] = float(samples[:, -2].sum())
        batch = hook.last_batch
        if isinstance(batch, PlannedBatch):
            stats |= actor.plan_batch(batch, batch.num_minibatches).metrics()
        return stats

    # The start: engines, rollout servers, the collector with what it recovers.

    def _create_train_engine(
        self, actor_config: DTAPPOActorConfig, alloc: ModelAllocation
    ) -> Any:
        """Create the actor, the reference, or a teacher."""
        ours = self._create_engine("actor", actor_config, alloc)
        return ours or super()._create_train_engine(actor_config, alloc)

    def _create_critic(
        self, critic_config: DTAPPOCriticConfig, alloc: ModelAllocation
    ) -> Any:
        ours = self._create_engine("critic", critic_config, alloc)
        return ours or super()._create_critic(critic_config, alloc)

    def _ensure_proxy_started(self) -> None:
        with our_proxy(self.scheduler):
            super()._ensure_proxy_started()

    def _init_rollout(
        self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None
    ) -> Any:
        if is_eval and self.valid_dataloader is None:
            return None  # nothing to evaluate: saves a process
        with (
            staleness_control_at_controller(self.scheduler)
            if isinstance(self.actor, DispatchController)
            else nullcontext()
        ):
            if rollout_config.engine == "local":
                controller = self._init_local_rollout(deepcopy(rollout_config), is_eval)
            else:
                controller = super()._init_rollout(rollout_config, is_eval, lora_path)
        if isinstance(controller, RolloutController):
            if is_eval:
                free_results(controller)
            else:
                load_when_saved(controller)
        return controller

    def _init_local_rollout(self, config: Any, is_eval: bool) -> Any:
        from areal.api.cli_args import SchedulingStrategy, SchedulingStrategyType

        from areal_dta.rollout_server.areal_backend import LocalEngine

        controller = LocalEngine.as_controller(config, self.scheduler)
        kwargs: dict[str, Any] = {"role": "rollout"}
        if is_eval:  # as AReaL does it: no staleness control, the same servers
            config.max_head_offpolicyness = int(1e12)
            config.scheduling_strategy = SchedulingStrategy(
                type=SchedulingStrategyType.colocation, target="rollout"
            )
            kwargs = {"role": "eval-rollout", "server_infos": self.rollout.server_infos}
        if token := os.environ.get(TOKEN_VARIABLE):
            for spec in config.scheduling_spec:
                # A local worker inherits it; as an argument, other users could read it.
                if self.config.scheduler.type != "local":
                    spec.env_vars[TOKEN_VARIABLE] = token
        options = self.config.local
        in_flight = self.config.num_requests_in_flight()
        server_args = {
            **asdict(options),
            "max_queued_requests": options.queue_limit(in_flight),
        }
        controller.initialize(server_args=server_args, **kwargs)
        return controller

    def _create_dataloader(
        self, dataset: Any, dataset_config: Any, rank: int, world_size: int
    ) -> Any:
        loader = super()._create_dataloader(
            dataset, dataset_config=dataset_config, rank=rank, world_size=world_size
        )
        if (
            isinstance(self.actor, DispatchController)
            and isinstance(dataset_config, TrainDatasetConfig)
            and not isinstance(dataset, RDataset)
        ):
            # Only the embedded server's client takes the ids out of the data again.
            return PromptIssuer(loader, add_ids=self.config.rollout.engine == "local")
        return loader

    def _start_collecting(self, rollout: RolloutController) -> None:
        config, options = self.config, self.config.collector
        planner = _planner(config)
        for controller in (self.actor, self.critic, self.ref):
            if isinstance(controller, DispatchController):
                controller.planner = planner
        collector = Collector(
            max_sequence_tokens=config.actor.mb_spec.max_tokens_per_mb,
            max_staleness=options.max_staleness,
            vocab_size=_vocab_size(config.actor.path, config.trust_remote_code),
            watch=RejectionWatch(
                config.train_dataset.batch_size,
                options.max_rejected_share,
                options.max_batches_without_result,
            ),
            takes_images=config.actor.engine != "dta",
        )
        prompts = self.train_dataloader
        self.hook = CollectorHook(
            rollout,
            collector,
            prompts if isinstance(prompts, PromptIssuer) else None,
            options.fetch_timeout_seconds,
        )
        if options.refit_costs:
            self.recover_handler.also["cost_model"] = planner
        # AReaL's constructor has restored the models.
        self.recover_handler.load_also()
        self.hook.step = self.num_steps_done

    def _more_engines(self) -> Mapping[str, Any]:
        return {} if self.critic is None else {"critic": self.critic}


def _planner(config: Any) -> BatchPlanner:
    """Return a planner whose costs start from the actor's model and options."""
    from transformers import AutoConfig

    block_tokens, retain_tokens = config.actor.dta.nominal_budgets()
    flops = None
    try:
        model = AutoConfig.from_pretrained(
            config.actor.path, trust_remote_code=config.trust_remote_code
        )
        flops = FlopModel.from_config(model)
    except ValueError as error:
        logger.warning(f"costs start from a nominal model: {error}")
    is_dense = config.actor.engine != "dta"
    return BatchPlanner(
        flops, block_tokens, retain_tokens, seed=config.seed, dense=is_dense
    )


def _vocab_size(model_path: str, trust_remote_code: bool) -> int | None:
    """Return the number of token ids of a model; None if its config does not say."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            model_path, trust_remote_code=trust_remote_code
        )
    except ValueError:  # an architecture that transformers does not know
        return None
    size = getattr(config.get_text_config(), "vocab_size", None)
    return None if size is None else int(size)
