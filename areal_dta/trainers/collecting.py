"""A PPO trainer whose rollouts are collected as they arrive, planned, and recovered."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from areal.api.cli_args import TrainDatasetConfig
from areal.infra import RolloutController
from areal.infra.data_service.rdataset import RDataset
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils import logging, stats_tracker

from areal_dta.areal_fixes.checkpoint_slots import (
    SlotRecoverHandler,
    slots_for_recovery,
)
from areal_dta.collector.collector import Collector
from areal_dta.collector.dispatch import DispatchController
from areal_dta.collector.hook import CollectorHook
from areal_dta.collector.planned_batch import PlannedBatch
from areal_dta.collector.planner import BatchPlanner
from areal_dta.collector.prompt_loader import PromptLoader
from areal_dta.schedule import DEFAULT_BLOCK_TOKENS, FlopModel

logger = logging.getLogger("CollectingTrainer")


class CollectingTrainer(PPOTrainer):
    """Stands before AReaL's trainer. Does nothing where the actor is not one of our
    engines: AReaL's own controllers cannot use a plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.hook: CollectorHook | None = None
        with slots_for_recovery():
            super().__init__(*args, **kwargs)
        self._since = time.monotonic()
        rollout = self.rollout
        if isinstance(self.actor, DispatchController) and isinstance(
            rollout, RolloutController
        ):
            try:
                self._start_collecting(rollout)
            except BaseException:  # workers keep the process alive
                self.abort()  # type: ignore[attr-defined]
                raise

    def _start_collecting(self, rollout: RolloutController) -> None:
        config = self.config
        planner = _planner(config)
        for controller in (self.actor, self.critic, self.ref):
            if isinstance(controller, DispatchController):
                controller.planner = planner
        collector = Collector(
            max_sequence_tokens=config.actor.mb_spec.max_tokens_per_mb,
            max_staleness=config.rollout.max_head_offpolicyness,
        )
        prompts = self.train_dataloader
        self.hook = CollectorHook(
            rollout, collector, prompts if isinstance(prompts, PromptLoader) else None
        )
        handler = self.recover_handler
        if isinstance(handler, SlotRecoverHandler):
            handler.also["cost_model"] = planner
        if self.recover_info is None:
            return
        handler.load_also()
        num_steps = self.recover_info.last_step_info.global_step + 1
        self.hook.step = num_steps
        for controller in (self.actor, self.critic):
            if isinstance(controller, DispatchController):
                controller.advance_lr_scheduler(num_steps)

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
            return PromptLoader(loader)
        return loader

    def _export_and_commit_stats(
        self, epoch: int, epoch_step: int, global_step: int
    ) -> None:
        if self.hook is not None:
            stats_tracker.scalar(**self._collector_stats(self.actor))
        super()._export_and_commit_stats(epoch, epoch_step, global_step)

    def _collector_stats(self, actor: DispatchController) -> Mapping[str, float]:
        """Take in the step's measured blocks; the step's metrics."""
        assert self.hook is not None
        now = time.monotonic()
        step_seconds, self._since = now - self._since, now
        collector, planner = self.hook.collector, actor.planner
        samples = actor.take_block_samples()
        planner.observe(np.array(samples, np.float64).reshape(-1, 8))
        stats = collector.take_metrics(step_seconds)
        seconds = planner.seconds(collector.total)
        stats["collector/waiting_predicted_seconds"] = seconds
        stats["plan/measured_blocks"] = planner.num_samples()
        batch = self.hook.last_batch
        if isinstance(batch, PlannedBatch):
            stats |= actor.plan_batch(batch, batch.num_minibatches).metrics()
        return stats

    def close(self) -> None:
        if self.hook is not None:
            self.hook.close()
        super().close()


def _planner(config: Any) -> BatchPlanner:
    from transformers import AutoConfig

    options = getattr(config.actor, "dta", None)
    budgets: dict[str, Any] = {}
    if options is not None and isinstance(options.block_tokens, int):
        budgets["block_tokens"] = options.block_tokens
    if options is not None and isinstance(options.retain_tokens, int):
        budgets["retain_tokens"] = options.retain_tokens
    budgets.setdefault("block_tokens", DEFAULT_BLOCK_TOKENS)
    flops = None
    try:
        model = AutoConfig.from_pretrained(config.actor.path, trust_remote_code=True)
        flops = FlopModel.from_config(model)
    except ValueError as error:
        logger.warning(f"costs start from a nominal model: {error}")
    engine = getattr(config.actor, "engine", "")
    return BatchPlanner(flops, seed=config.seed, dense=engine != "dta", **budgets)
