"""AReaL's FSDP engine with its three batch calls through the tree executor.

Loading, optimizer, clipping, checkpoints, weight updates and offload are AReaL's. What
changes is how ``train_batch``, ``eval_batch`` and ``forward_batch`` get the logprobs:
every token of the prefix tree of this rank's rows is computed once. An update is

    rows -> batch.py -> PrefixTree -> oom_retry.py (budgets, FSDP2) -> TreeExecutor,
    which calls loss.py block by block -> AReaL's optimizer step

Invariants, and the tests that hold them (tests/engine):
  * gradients, losses and statistics equal AReaL's: test_parity.py
  * ranks with different or no rows never wait for one another in between, and the
    result equals that of one rank on all rows: test_two_ranks.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from areal.api import FinetuneSpec, ParallelStrategy
from areal.api.cli_args import TrainEngineConfig
from areal.engine.core import reorder_and_pad_outputs
from areal.utils import logging
from areal.utils.data import split_batch
from areal.utils.perf_tracer import trace_scope
from numpy.typing import NDArray
from torch import Tensor

from areal_dta.areal_fixes.training_engines import RecoverableEngine
from areal_dta.engine.batch import BatchInput, OutputRule, RankBatch, needed_outputs
from areal_dta.engine.loss import (
    LossFn,
    LossWeightFn,
    MicroBatchLoss,
    choose_scope,
    traits_of,
)
from areal_dta.engine.oom_retry import TreeRunner
from areal_dta.engine.placeholder_rows import load_together
from areal_dta.engine.setting_checks import (
    check_actor_config,
    effective_config,
    option,
    router_aux_loss,
    zero_dropout_rates,
)
from areal_dta.engine.statistics import TrainingWork, derive_ratios, record_expert_load
from areal_dta.engine.watch.skipped_steps import (
    report_skipped_step,
    spread_to_gradient,
)
from areal_dta.executor import TreeExecutor
from areal_dta.executor.checks.multimodal import freeze_other_parts, is_multimodal
from areal_dta.executor.model_refusals import check_unloaded_model
from areal_dta.executor.states.kinds import scan_line
from areal_dta.schedule import FlopModel
from areal_dta.tree import PrefixTree

if TYPE_CHECKING:
    from areal.api import Scheduler


class DTAEngine(RecoverableEngine):
    """Data-parallel training on prefix trees.

    Options come from ``config.dta`` (`areal_dta.config.engine_options.DTAOptions`) if
    the configuration has it, else the defaults hold. With ``positions=auto`` AReaL's
    own losses get the outputs that they need, and zeros elsewhere, which they mask; any
    other loss gets all outputs. With ``is_critic`` the model gives values, which take
    the place of logprobs.

    Mixin; list it before AReaL's class of an algorithm so that its methods win. Such a
    subclass may change an update by two hooks: `prepare_rows` and `wrap_loss`.

    Raises:
        ValueError: the configuration or the model asks for what trees cannot do, or
            ``is_critic`` is not what the algorithm needs.
    """

    trains_values = False
    """Whether the algorithm trains values instead of a language model."""
    has_placeholders = False
    """Whether AReaL's algorithm is running on placeholder rows."""

    def __init__(self, config: TrainEngineConfig) -> None:
        self._check_kind(config)
        messages = check_actor_config(config)
        super().__init__(effective_config(config))
        self.is_vision_model = is_multimodal(self.model_config)  # decides how it loads
        self._router_coefficient, found = router_aux_loss(config, self.model_config)
        messages += found
        messages += check_unloaded_model(
            self.model_config,
            is_critic=config.is_critic,
            trains=config.optimizer is not None,
            disable_dropout=config.disable_dropout,
            router_load=option(config, "router_load"),
            router_aux_loss=bool(self._router_coefficient),
        )
        logger = logging.getLogger("DTAEngine")
        for message in messages:
            logger.warning(message)
        self.runner: TreeRunner | None = None
        self._forward_rule: OutputRule | None = None
        self._flop_model: FlopModel | None = None
        self._num_updates = 0

    @classmethod
    def as_controller(cls, config: Any, scheduler: Scheduler | None) -> Any:
        """Return AReaL's (v1) controller, whose workers run this engine.

        Raises:
            ValueError: the configuration asks for what the tree engine cannot do.
        """
        cls._check_kind(config)
        check_actor_config(config)
        areal_class: Any = super()
        return areal_class.as_controller(config, scheduler)

    def create_process_group(
        self, parallel_strategy: ParallelStrategy | None = None
    ) -> None:
        ps = parallel_strategy
        if ps is not None and ps.world_size != ps.data_parallel_size:
            raise ValueError(
                f"the tree engine supports data parallelism only, got {ps}; use "
                f"actor.backend=dta:d{ps.world_size}"
            )
        super().create_process_group(parallel_strategy)

    def initialize(
        self, addr: str | None, ft_spec: FinetuneSpec, *args: Any, **kwargs: Any
    ) -> None:
        super().initialize(addr, ft_spec, *args, **kwargs)
        optimizer = getattr(self, "optimizer", None)
        self.runner = TreeRunner(
            self.model, self.config, self.cpu_group, self.logger, optimizer
        )
        fused = self.runner.executor.fuse()
        if fused.replaced or fused.left:
            self.logger.info(f"dta.fused_layers={fused}")
        if (line := scan_line(self.model)) is not None:
            self.logger.info(line)
        try:
            self._flop_model = FlopModel.from_config(
                self.model_config, self.config.is_critic
            )
        except ValueError as error:
            self.logger.warning(f"no dta/predicted_saving: {error}")

    def destroy(self) -> None:
        self.runner = None
        super().destroy()

    def prepare_rows(self, input_: BatchInput) -> BatchInput:
        """Hook: return the rows that are trained or evaluated on, from those given."""
        return [] if self.has_placeholders else input_

    def wrap_loss(self, loss_fn: LossFn, input_: BatchInput) -> LossFn:
        """Hook: return the loss that an update on ``input_`` calls."""
        return loss_fn

    def train_batch(
        self, input_: BatchInput, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        """One optimizer step. Collective; a rank may have no rows.

        In the ``sequence`` scope the loss is called on the sequences that end in one
        block and lie in one of AReaL's micro-batches, packed; each call is scaled by
        its weight over the total of all ranks, so the weights must add up over rows.
        In the ``batch`` scope it is called as AReaL calls it, once per micro-batch.
        """
        self._ensure_ready()
        runner = self._ready_runner()
        runner.check_once()
        # the rows of this rank, their loss and their tree
        loss_fn = self.wrap_loss(loss_fn, input_)
        scope = choose_scope(traits_of(loss_fn), option(self.config, "loss_scope"))
        self.optimizer_zero_grad()
        loss = self._load_loss(input_, loss_fn, loss_weight_fn, whole=scope == "batch")
        tree, row_of = _build_tree(loss.batch)

        def group_loss(indices: list[int], *outputs: list[Tensor]) -> Tensor:
            rows = [row_of[i] for i in indices]
            # FSDP averages over the ranks; the total weight is that of all of them.
            return loss(rows, outputs) * self.parallel_helper.dp_size

        router_weights = self._router_weights(loss, row_of)

        # forward and backward over the tree
        needed = self._needed_outputs(loss.batch, row_of, loss.needed_outputs)
        every = option(self.config, "verify_every")
        if every and self._num_updates % every == 0:
            runner.verify(tree, needed, self._num_updates // every)
        self._num_updates += 1
        with trace_scope("dta_engine.forward_backward"):
            total = runner.train(
                tree, group_loss, needed, scope, loss.statistics, router_weights
            )

        # statistics, then the update
        loss.finish()
        self._record(tree, runner.executor, total / self.parallel_helper.dp_size, scope)
        spread_to_gradient(self.model, total)
        stats: dict[str, float] = self.optimizer_step()
        rule = loss.needed_outputs
        report_skipped_step(self, loss.batch, rule.mask if rule else None, stats)
        stats["num_micro_batches"] = len(loss.batch.micro_batches)
        return stats

    @torch.no_grad()
    def eval_batch(
        self, input_: BatchInput, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> Tensor:
        """The loss of all ranks' rows, with one call per micro-batch. Collective."""
        self._ensure_ready()
        loss = self._load_loss(input_, loss_fn, loss_weight_fn, whole=True)
        value = loss(*self._forward_rows(loss.batch, loss.needed_outputs)).float()
        loss.finish()
        dist.all_reduce(value, group=self.dp_group)
        return value

    @torch.no_grad()
    def forward_batch(
        self,
        input_: BatchInput,
        output_seqlens: list[int] | None = None,
        aggregate_fn: Callable[[list[Tensor]], Tensor] = torch.cat,
    ) -> Tensor | list[Tensor]:
        """Return logprobs [rows, longest], or values for a critic.

        ``logprobs[:, t]`` is that of token t+1, and 0 at the last position;
        ``values[:, t]`` is the value after reading token t. A list of trajectories
        gives a list again. Collective; a rank without rows gets a tensor [0, 0] or an
        empty list.
        """
        self._ensure_ready()
        batch, _ = load_together(input_, self.config.mb_spec, self.cpu_group)
        if output_seqlens is not None and output_seqlens != batch.lengths:
            raise ValueError(
                f"output_seqlens={output_seqlens}; expected the lengths in "
                f"attention_mask, {batch.lengths}"
            )
        row_of, channels = self._forward_rows(batch, self._forward_rule)
        if not batch.num_rows:
            empty = torch.zeros((0, 0), dtype=torch.float32, device=self.device)
            return empty if batch.meta is None else [empty] * batch.meta.n_trajs
        # per micro-batch, packed, as AReaL's helper wants them
        found = dict(zip(row_of, channels[0], strict=True))
        outputs = [
            batch.pack_outputs(rows, found, self.device) for rows in batch.micro_batches
        ]
        result = reorder_and_pad_outputs(
            outputs,
            batch.lengths,
            batch.micro_batch_list(self.config.mb_spec),
            aggregate_fn,
        )
        return result if batch.meta is None else split_batch(result, batch.meta)

    def export_stats(self) -> dict[str, float]:
        return derive_ratios(super().export_stats())

    def _create_device_model(self) -> None:
        super()._create_device_model()
        if self.config.disable_dropout:
            zero_dropout_rates(self.model)
        self._freeze_other_parts()

    def _apply_peft_wrapper(self) -> None:
        super()._apply_peft_wrapper()
        self._freeze_other_parts()

    def _freeze_other_parts(self) -> None:
        if self.is_vision_model and (num_frozen := freeze_other_parts(self.model)):
            self.logger.info(
                f"{self.model_config.model_type}: text is trained alone, "
                f"{num_frozen:,} parameters of other parts stay as they are"
            )

    @classmethod
    def _check_kind(cls, config: Any) -> None:
        wanted = cls.trains_values
        if bool(config.is_critic) is not wanted:
            raise ValueError(
                f"is_critic={str(config.is_critic).lower()}: {cls.__name__} trains "
                f"{'values' if wanted else 'a language model'}; "
                f"set is_critic={str(wanted).lower()}"
            )

    def _ready_runner(self) -> TreeRunner:
        if self.runner is None:
            raise RuntimeError("the engine is not initialized; call initialize() first")
        return self.runner

    def _load_loss(
        self,
        input_: BatchInput,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        whole: bool,
    ) -> MicroBatchLoss:
        """Load the rows of a training or evaluation step, and its loss. Collective."""
        rows = self.prepare_rows(input_)
        return MicroBatchLoss(
            *load_together(rows, self.config.mb_spec, self.cpu_group),
            loss_fn,
            loss_weight_fn,
            self.device,
            self.cpu_group,
            is_critic=self.config.is_critic,
            whole=whole,
        )

    @contextmanager
    def forward_needs_only(self, rule: OutputRule) -> Iterator[None]:
        """Context manager: ``forward_batch`` gives what ``rule`` names, 0 elsewhere."""
        self._forward_rule = rule
        try:
            yield
        finally:
            self._forward_rule = None

    def _needed_outputs(
        self, batch: RankBatch, row_of: list[int], rule: OutputRule | None
    ) -> list[NDArray[np.bool_]] | None:
        if option(self.config, "positions") == "all" or rule is None:
            return None
        return needed_outputs(batch, row_of, rule, self.config.is_critic)

    def _router_weights(
        self, loss: MicroBatchLoss, row_of: list[int]
    ) -> list[float] | None:
        """Return the factor of each sequence's router loss; None: there is none."""
        if not self._router_coefficient:
            return None
        shares = loss.row_shares(row_of, self.config.mb_spec.granularity)
        scale = self._router_coefficient * self.parallel_helper.dp_size
        return [scale * share for share in shares]

    def _forward_rows(
        self, batch: RankBatch, rule: OutputRule | None
    ) -> tuple[list[int], list[list[Tensor]]]:
        """Return the non-empty rows; and logprobs and entropies [len - 1], or values
        [len], per row."""
        tree, row_of = _build_tree(batch)
        runner = self._ready_runner()
        needed = self._needed_outputs(batch, row_of, rule)
        with trace_scope("dta_engine.forward"):
            outputs = runner.forward(tree, needed)
        if self.config.is_critic:
            return row_of, [[x.values for x in outputs]]
        return row_of, [[x.logprobs for x in outputs], [x.entropy for x in outputs]]

    def _record(
        self, tree: PrefixTree, executor: TreeExecutor, loss: float, scope: str
    ) -> None:
        stats, schedule = executor.last_stats, executor.last_schedule
        assert stats is not None and schedule is not None
        dense_flops = tree_flops = 0.0
        if self._flop_model is not None:
            lengths = map(tree.sequence_length, range(tree.num_sequences))
            dense_flops = self._flop_model.dense(lengths)
            tree_flops = self._flop_model.schedule(schedule)
            if scope == "batch":  # its first pass
                needed = schedule.cut.needed
                tree_flops += self._flop_model.tree(tree, training=False, needed=needed)
        router_loss = 0.0
        if self._router_coefficient:
            scale = self._router_coefficient * self.parallel_helper.dp_size
            router_loss = stats.router_loss / scale
        first_pass_tokens = stats.num_computed_tokens if scope == "batch" else 0
        TrainingWork(
            sequence_tokens=stats.num_sequence_tokens,
            tree_tokens=stats.num_tree_tokens,
            computed_tokens=first_pass_tokens + stats.num_forward_tokens,
            num_blocks=stats.num_blocks,
            dense_flops=dense_flops,
            tree_flops=tree_flops,
            router_aux_loss=router_loss,
            loss=loss,
        ).record(self.dp_rank == 0, self.device)
        if option(self.config, "router_load"):
            record_expert_load(stats.expert_load, self.cpu_group)


def _build_tree(batch: RankBatch) -> tuple[PrefixTree, list[int]]:
    """Return the tree of the non-empty rows, and the row of each of its sequences."""
    sequences, row_of = batch.sequences()
    return PrefixTree.from_sequences(sequences), row_of
