"""Faults of AReaL's PPO trainer that `areal_fixes.trainer_steps` repairs.

Each test shows a fault without the repair: when it fails, AReaL has mended it.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from areal.api import FinetuneSpec
from areal.api.cli_args import (
    AgentConfig,
    InferenceEngineConfig,
    NameResolveConfig,
    SaverConfig,
)
from areal.infra.workflow_executor import WorkflowExecutor
from areal.trainer.rl_trainer import PPOTrainer
from areal.utils import name_resolve, names
from areal.utils.saver import Saver

from areal_dta.areal_fixes.trainer_steps import (
    critic_stats,
    saved_together,
    staleness_control_at_controller,
)


def test_without_saved_together(tmp_path: Path) -> None:
    def saved_in_steps(repaired: bool) -> list[tuple[str, int]]:
        config = SaverConfig(
            experiment_name="e",
            trial_name=str(repaired),
            fileroot=str(tmp_path),
            freq_steps=3,
        )
        spec = FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1)
        trainer: Any = PPOTrainer.__new__(PPOTrainer)
        trainer.saver = Saver(config, spec)
        trainer.tokenizer = trainer.processor = None
        saved: list[tuple[str, int]] = []
        step = 0
        for name in ("actor", "critic"):
            engine = SimpleNamespace(save=lambda _, n=name: saved.append((n, step)))
            setattr(trainer, name, engine)
        for step in range(3):  # noqa: B007  # `save` reads it
            with saved_together(trainer.saver) if repaired else nullcontext():
                trainer._save_hf(0, step, step)
        return saved

    assert saved_in_steps(repaired=False) == [("actor", 1), ("critic", 2)]
    assert saved_in_steps(repaired=True) == [("actor", 2), ("critic", 2)]


def test_without_critic_stats() -> None:
    trainer: Any = MagicMock()
    trainer.actor.export_stats.return_value = {"actor": 1.0}
    trainer.rollout.export_stats.return_value = {}
    trainer.eval_rollout = None
    PPOTrainer._export_and_commit_stats(trainer, 0, 0, 0)
    trainer.stats_logger.commit.assert_called_once_with(0, 0, 0, {"actor": 1.0})
    assert not trainer.critic.mock_calls
    trainer.critic._custom_function_call.return_value = {"values": 2.0}
    assert critic_stats(trainer.critic) == {"critic/values": 2.0}


def test_without_staleness_control_at_controller() -> None:
    """A worker does not start the rollout that replaces one of a full batch."""

    class Scheduler:
        async def create_engine(
            self, worker: str, config: InferenceEngineConfig
        ) -> int:
            """Return how many more rollouts a worker starts after its first batch."""
            engine: Any = SimpleNamespace(get_version=lambda: 0)
            executor = WorkflowExecutor(config, engine)
            executor.initialize(train_data_parallel_size=1)
            try:
                for _ in range(config.consumer_batch_size):
                    executor.staleness_manager.on_rollout_submitted()
                    executor.staleness_manager.on_rollout_accepted()
                return executor.get_capacity()
            finally:
                executor.destroy()

    config = InferenceEngineConfig(
        backend="sglang:d1", consumer_batch_size=4, max_head_offpolicyness=0
    )
    scheduler = Scheduler()
    assert asyncio.run(scheduler.create_engine("rollout/0", config=config)) == 0
    with staleness_control_at_controller(scheduler):
        assert asyncio.run(scheduler.create_engine("rollout/0", config=config)) == 4
    assert config.max_head_offpolicyness == 0  # the controller's own


def test_without_teacher_cleared() -> None:
    """One step of AReaL's loop, with everything else replaced."""
    trainer: Any = MagicMock()
    trainer.config.total_train_steps = 1
    trainer.config.total_train_epochs = 1
    trainer.recover_info = None
    trainer.config.memory_profiler = None
    trainer.config.rollout.agent.mode = "inline"
    trainer.train_dataloader.__len__.return_value = 1
    trainer.actor.prepare_batch.return_value = [{}]
    PPOTrainer.train(trainer, workflow="not.used")
    for name in ("actor", "critic", "ref"):
        assert getattr(trainer, name).clear_batches.called
    assert trainer.teacher.compute_logp.called
    assert not trainer.teacher.clear_batches.called


def test_without_free_results() -> None:
    """AReaL waits for evaluation rollouts, and forgets what it got."""
    trainer: Any = MagicMock()
    trainer.valid_dataloader = [[{}], [{}]]
    results = trainer.eval_rollout.wait.return_value
    PPOTrainer._evaluate_fn(trainer, "not.used", None)
    trainer.eval_rollout.wait.assert_called_once_with(2, timeout=None)
    assert not results.mock_calls
    assert not trainer.eval_rollout.clear_batches.called
    assert not trainer.actor.clear_batches.called


def test_without_with_secret_key() -> None:
    assert AgentConfig.admin_api_key == "areal-admin-key"


def test_without_start_name_service(tmp_path: Path) -> None:
    from areal.infra import RayScheduler

    name_resolve.reconfigure(
        NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path))
    )
    old = f"{names.trial_root('e', 't')}/old"
    name_resolve.add(old, "of an earlier run")
    config: Any = MagicMock()
    config.experiment_name, config.trial_name = "e", "t"
    config.cluster.fileroot = str(tmp_path)
    RayScheduler(exp_config=config)
    assert name_resolve.get(old) == "of an earlier run"
