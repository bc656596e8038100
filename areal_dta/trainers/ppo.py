"""AReaL's PPO trainer with the tree engine, the embedded server, and our report.

Everything algorithmic stays AReaL's: this subclass chooses classes for the backends
that AReaL does not know.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from areal.api.cli_args import AgentConfig
from areal.infra import RolloutController
from areal.trainer.rl_trainer import PPOTrainer

from areal_dta.areal_fixes import agent_proxy as proxy
from areal_dta.areal_fixes.weight_sync import load_when_saved
from areal_dta.config.resolved import ResolvedRun
from areal_dta.config.schema import DTAGRPOConfig, DTAPPOActorConfig, DTAPPOCriticConfig
from areal_dta.report.logprob_gap import logprob_gap
from areal_dta.trainers.collecting import CollectingTrainer
from areal_dta.trainers.watched import WatchedTrainer, wrapped

if TYPE_CHECKING:
    from areal.api.alloc_mode import ModelAllocation


class DTATrainer(CollectingTrainer, WatchedTrainer, PPOTrainer):
    """Trains as `PPOTrainer` does; use as a context manager."""

    batch_call = "prepare_batch"
    config: DTAGRPOConfig
    critic: Any
    teacher: Any
    _logprob_gap: Mapping[str, float] | None = None

    def __init__(self, run: ResolvedRun, *args: Any, **kwargs: Any) -> None:
        super().__init__(_with_secret_key(run), *args, **kwargs)

    def train(self, workflow: Any = None, *args: Any, **kwargs: Any) -> None:
        if workflow is not None and self._requires_proxy_workflow(workflow):
            self._ensure_proxy_started()  # before it is looked up who may die
        with (
            wrapped(self.actor, "compute_logp", self._compared),
            wrapped(self.actor, "clear_batches", self._cleared),
        ):
            super().train(workflow, *args, **kwargs)

    def _ensure_proxy_started(self) -> None:
        with wrapped(self.scheduler, "fork_workers", self._with_our_proxy):
            super()._ensure_proxy_started()

    def _with_our_proxy(self, fork: Callable[..., Any]) -> Callable[..., Any]:
        """AReaL's agent proxy, started through a module of ours (`proxy` says why)."""
        local = self.config.launch.loopback and self.config.scheduler.type == "local"
        module = proxy.LOOPBACK_MODULE if local else proxy.MODULE

        def forked(*args: Any, command: str | None = None, **kwargs: Any) -> Any:
            ours = module if command == proxy.AREAL_MODULE else command
            return fork(*args, command=ours, **kwargs)

        return forked

    def _compared(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The trainer's logprobs, compared with the rollout server's on the way."""

        def compared(batch: Any, *args: Any, **kwargs: Any) -> Any:
            recomputed = call(batch, *args, **kwargs)
            version = self.actor.get_version()
            self._logprob_gap = logprob_gap(batch, recomputed, version)
            return recomputed

        return compared

    def _cleared(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """AReaL 1.0.4 clears what every model fetched of a batch, but not a teacher's
        share, which would stay in its memory."""

        def cleared(rollout_batch: Any, *more: Any) -> None:
            call(rollout_batch, *more)
            teacher = self.config.teacher
            if teacher is not None and teacher.engine_type == "train":
                self.teacher.clear_batches(rollout_batch)

        return cleared

    def more_stats(self) -> Mapping[str, float]:
        gap, self._logprob_gap = self._logprob_gap, None
        return {**self._critic_stats(), **(gap or {})}

    def _critic_stats(self) -> Mapping[str, float]:
        # AReaL 1.0.4 exports those of the actor alone.
        if self.critic is None:
            return {}
        found = self.critic._custom_function_call("export_stats")
        own = "ppo_critic/"
        return {k if k.startswith(own) else f"critic/{k}": v for k, v in found.items()}

    def _create_train_engine(
        self, actor_config: DTAPPOActorConfig, alloc: ModelAllocation
    ) -> Any:
        """Of the actor, the reference, or a teacher."""
        ours = self._create_engine("actor", actor_config, alloc)
        return ours or super()._create_train_engine(actor_config, alloc)

    def _create_critic(
        self, critic_config: DTAPPOCriticConfig, alloc: ModelAllocation
    ) -> Any:
        ours = self._create_engine("critic", critic_config, alloc)
        return ours or super()._create_critic(critic_config, alloc)

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

        from areal_dta.rollout_server import LocalEngine

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

    def _measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            batch = call(*args, **kwargs)
            self._measure(batch)
            return batch

        return measured


def _with_secret_key(run: ResolvedRun) -> ResolvedRun:
    """Return a copy whose agent proxy has its own key: AReaL's default is public."""
    run = deepcopy(run)
    assert run.rollout is not None
    agent = run.rollout.config.agent
    if agent.admin_api_key == AgentConfig.admin_api_key:
        agent.admin_api_key = secrets.token_urlsafe(32)
    return run
