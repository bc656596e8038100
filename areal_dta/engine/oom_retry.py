"""Trees on a model that FSDP2 shards: out of memory is retried, budgets are chosen.

``dta.reshard=step`` gathers the parameters for a whole pass (fsdp_gather_step),
``block`` for every layer (fsdp_gather_layer); ``auto`` takes ``step`` as long as every
rank predicts that it fits, which is asked again when a longer path comes.
``dta.block_tokens`` and ``dta.retain_tokens`` may be ``auto``; they are then chosen at
the first batch, and again when a longer path comes.

Out of memory with ``step``: the rank drops the gradients and the statistics of this
step, halves its budgets and runs its tree again. After some passes without a shortage
it goes back to the larger budgets. Nothing is communicated within a pass, so the other
ranks need not know; they wait at its end. With ``block`` they would be
waiting inside a collective: the error is raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from areal_dta.areal_fixes.fsdp2 import (
    compute_dtype,
    drop_unreduced_gradients,
    group_bytes,
)
from areal_dta.engine.fsdp_gather_layer import LayerwiseGather, why_not_whole
from areal_dta.engine.fsdp_gather_step import forward_pass, training_pass
from areal_dta.engine.setting_checks import option
from areal_dta.engine.statistics import LossStatistics
from areal_dta.engine.watch.verify import verify_batch
from areal_dta.executor import (
    ExecutorConfig,
    GroupLoss,
    Positions,
    TreeExecutor,
    UnsupportedModelError,
)
from areal_dta.executor.checks.self_check import check_on_tiny_tree
from areal_dta.executor.kernels.selection import BlockSizes, choose_kernel
from areal_dta.executor.memory.budget import (
    MAX_BLOCK_TOKENS,
    MIN_CHOSEN_BLOCK,
    choose_budgets,
    halved,
    is_out_of_memory,
    pending_bytes,
    predict_memory,
    release_memory,
    shortage_advice,
    usable_memory,
)
from areal_dta.executor.memory.model_bytes import measured_memory
from areal_dta.schedule import MemoryModel
from areal_dta.tree import PrefixTree

ResultT = TypeVar("ResultT")

_OPTIONS = ("kernel", "router_load", "recompute", "fused_layers")
_TRIAL_PATH = 4096  # tokens above the block on which attention kernels are timed
_PATIENCE = 8  # passes after which larger budgets are tried again; doubled each time
_MAX_PATIENCE = 1024
_KEPT_SAMPLES = 1000  # blocks per rank that a cost model looks back on


class TreeRunner:
    """Traversals of one rank.

    Args:
        config: of the engine; its ``dta`` may be missing.
        group: a CPU group of all ranks.
        optimizer: its state will take memory after the first step.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        group: dist.ProcessGroup,
        logger: Any,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        budgets = {n: option(config, n) for n in ("block_tokens", "retain_tokens")}
        self._chooses_block, self._chooses_retain = (
            budget == "auto" for budget in budgets.values()
        )
        self.executor = TreeExecutor(
            model,
            ExecutorConfig(
                temperature=config.temperature,
                **{name: option(config, name) for name in _OPTIONS},
                **{name: n for name, n in budgets.items() if n != "auto"},
            ),
            outputs="values" if config.is_critic else "logprobs",
        )
        self.logger = logger
        self._group, self._optimizer = group, optimizer
        self._layerwise: LayerwiseGather | None = None
        reshard = option(config, "reshard")
        if reshard == "block":
            self._gather_by_layer()
        # single sequences, for `verify`, need the whole model
        self._chooses_reshard = reshard == "auto" and not option(config, "verify_every")
        self._reshard_path = -1
        self._recompute = option(config, "recompute")
        self._checks_model = bool(option(config, "self_check"))
        self._device = next(model.parameters()).device
        is_open = self._device.type == "cuda" and option(config, "kernel") == "auto"
        self._chooses_kernel = is_open
        self._planned_path = 0
        self._larger: list[ExecutorConfig] = []  # before each shortage of memory
        self._patience, self._calm_passes = _PATIENCE, 0
        self._memory: MemoryModel | None = None
        self._block_samples: deque[tuple[float, ...]] = deque(maxlen=_KEPT_SAMPLES)

    def take_block_samples(self) -> list[tuple[float, ...]]:
        """Return the blocks measured since the last call (`BlockSample.to_floats`)."""
        samples = list(self._block_samples)
        self._block_samples.clear()
        return samples

    def check_once(self) -> None:
        """Compare a tiny tree with single sequences, and choose the attention kernel of
        a GPU, at the first call. Collective.

        Raises:
            UnsupportedModelError: they differ, on this rank or another.
        """
        if self._checks_model:
            self._check_model()
            self._checks_model = False
        if self._chooses_kernel:
            self._chooses_kernel = False
            self._choose_kernel()

    def _check_model(self) -> None:
        own: str | None = None
        self._choose_reshard()
        try:
            with self._forward_pass():
                check_on_tiny_tree(self.executor)
        except UnsupportedModelError as error:
            own = str(error)
        except Exception as error:
            self._tell(f"{type(error).__name__}: {error}")
            raise
        failures = [text for text in self._tell(own) if text is not None]
        if failures:
            raise UnsupportedModelError(own if own is not None else failures[0])

    def _choose_kernel(self) -> None:
        """Decide what kernel=auto means on this device, the same on all ranks."""
        executor = self.executor
        with self._forward_pass():
            executor.profile(find_randomness=False)

        def gather(found: dict[str, float | None]) -> list[dict[str, float | None]]:
            of_ranks: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(of_ranks, found, group=self._group)
            return of_ranks

        block_tokens = executor.config.block_tokens
        sizes = BlockSizes.of(executor.model, block_tokens, _TRIAL_PATH)
        name, line = choose_kernel(
            sizes,
            list(executor.layers.values()),
            self._device,
            compute_dtype(executor.model),
            gather,
        )
        executor.config = replace(executor.config, kernel=name)
        self.logger.info(line)

    def _tell(self, failure: str | None) -> list[str | None]:
        """Exchange how the self-check ended; return each rank's failure. Collective."""
        failures: list[str | None] = [None] * dist.get_world_size(self._group)
        text = failure and f"rank {dist.get_rank(self._group)}: {failure}"
        dist.all_gather_object(failures, text, group=self._group)
        return failures

    def verify(self, tree: PrefixTree, needed: Positions | None, turn: int) -> None:
        """Compute a few of the tree's sequences one at a time as well. Collective."""

        def chosen_pass() -> AbstractContextManager[None]:
            return training_pass(self.executor.model, self._group)

        if self._chooses_block or self._chooses_retain:
            with self._forward_pass():
                self._choose(tree)  # as the update will, by the longest path of all
        verify_batch(
            self.executor, chosen_pass, tree, needed, turn, self._group, self.logger
        )

    def train(
        self,
        tree: PrefixTree,
        group_loss: GroupLoss,
        needed: Positions | None,
        scope: str,
        statistics: LossStatistics,
        router_weights: list[float] | None = None,
    ) -> float:
        """Return the loss of this rank's tree; gradients are reduced. Collective."""
        executor, model = self.executor, self.executor.model

        def attempt() -> float:
            return executor.forward_backward_groups(
                tree, group_loss, needed, scope, router_weights
            )

        def undo() -> None:
            drop_unreduced_gradients(model)
            statistics.discard()

        self._choose_reshard(tree)
        with self._training_pass():
            self._choose(tree)
            return self._within_memory(attempt, undo, training=True)

    def forward(self, tree: PrefixTree, needed: Positions | None) -> list[Any]:
        """Run `TreeExecutor.forward`. Collective."""
        executor, model = self.executor, self.executor.model
        self._choose_reshard(tree)
        with self._forward_pass():
            self._choose(tree)
            return self._within_memory(
                lambda: executor.forward(tree, needed),
                lambda: drop_unreduced_gradients(model),
                training=False,
            )

    def _training_pass(self) -> AbstractContextManager[None]:
        if self._layerwise is not None:
            return self._layerwise.training_pass()
        return training_pass(self.executor.model, self._group)

    def _forward_pass(self) -> AbstractContextManager[None]:
        if self._layerwise is not None:
            return self._layerwise.forward_pass()
        return forward_pass(self.executor.model, self._group)

    def _within_memory(
        self, attempt: Callable[[], ResultT], undo: Callable[[], None], training: bool
    ) -> ResultT:
        """Call ``attempt``, again with smaller budgets whenever memory runs out."""
        while True:
            try:
                result = attempt()
                self._block_samples.extend(
                    sample.to_floats() for sample in self.executor.last_samples
                )
                self._grow_again(training)
                return result
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                before = self.executor.config
                smaller = halved(before, training, self.executor.retained_at_failure)
                if self._layerwise is not None or smaller is None:
                    error.add_note(shortage_advice(before, self._layerwise is not None))
                    raise
                reason = str(error).split("\n")[0][:200]
            # not in the handler: the error's traceback keeps the block's tensors alive
            undo()
            release_memory()
            self.executor.config = smaller
            self._larger.append(before)
            self._calm_passes = 0
            self.logger.warning(
                f"out of memory ({reason}): this step runs again on this rank with "
                f"block_tokens {before.block_tokens} -> {smaller.block_tokens}, "
                f"retain_tokens {before.retain_tokens} -> {smaller.retain_tokens}, "
                f"for the next {self._patience} passes"
            )

    def _grow_again(self, training: bool) -> None:
        """Go back to the budgets before a shortage, after some passes without one.

        Where that ends in the next shortage the wait doubles.
        """
        if not self._larger or not (training or self._optimizer is None):
            return
        self._calm_passes += 1
        if self._calm_passes < self._patience:
            return
        self.executor.config = config = self._larger.pop()
        self._calm_passes = 0
        self._patience = min(2 * self._patience, _MAX_PATIENCE)
        self.logger.info(
            f"no shortage of memory for some passes: block_tokens="
            f"{config.block_tokens}, retain_tokens={config.retain_tokens} again"
        )

    def _gather_by_layer(self) -> None:
        self._layerwise = LayerwiseGather(self.executor.model, self._group)
        self.executor.pace = self._layerwise

    def _choose_reshard(self, tree: PrefixTree | None = None) -> None:
        """Gather layer by layer from now on, if some rank has no room to gather all.

        Collective, before a pass over ``tree`` gathers anything.
        """
        if not self._chooses_reshard or self._layerwise is not None:
            return
        longest = torch.tensor([_longest(tree) if tree is not None else 0])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._group)
        if int(longest) <= self._reshard_path:
            return
        self._reshard_path = int(longest)
        reason = why_not_whole(
            self.executor.model,
            self.executor.config,
            self._group,
            self._reshard_path,
            self._pending_bytes(),
            training=self._optimizer is not None,
            chooses_block=self._chooses_block,
        )
        if reason is None:
            return
        self._gather_by_layer()
        self._memory, self._planned_path = None, 0
        self.logger.info(f"reshard=block: {reason}")

    def _choose(self, tree: PrefixTree) -> None:
        if not (self._chooses_block or self._chooses_retain):
            return
        longest = _longest(tree)
        if longest <= self._planned_path:
            return
        # the range of block sizes, and the memory that is left for a pass
        executor = self.executor
        device = next(executor.model.parameters()).device
        largest = MAX_BLOCK_TOKENS.get(device.type, MAX_BLOCK_TOKENS["cpu"])
        smallest = MIN_CHOSEN_BLOCK.get(device.type, MIN_CHOSEN_BLOCK["cpu"])
        if self._layerwise is not None and device.type == "cuda":
            largest *= 4  # each block gathers all parameters: the fewer, the better
        if not self._chooses_block:
            largest = smallest = executor.config.block_tokens
        num_processes = dist.get_world_size(self._group)
        pending = self._pending_bytes()
        usable = usable_memory(device, num_processes) - pending
        # the fastest budgets that are predicted to fit
        budgets = choose_budgets(
            self._memory_model(),
            usable,
            longest,
            largest,
            smallest,
            training=self._optimizer is not None,
            recompute=self._recompute,
        )
        chosen = budgets.apply(executor.config, retain=self._chooses_retain)
        executor.config, self._planned_path = chosen, longest
        self._larger.clear()
        self.logger.info(
            f"paths of up to {longest} tokens: {budgets}, beside "
            f"{pending / 2**30:.2f} GiB for gradients and the optimizer"
        )
        if not budgets.fits:
            remedy = "more ranks" if self._layerwise else "reshard=block or more ranks"
            self.logger.warning(
                f"even block_tokens={budgets.block_tokens} without retained graphs is "
                f"predicted not to fit; trying it. {remedy} would need less memory"
            )

    def _memory_model(self) -> MemoryModel:
        if self._memory is None:
            executor = self.executor
            memory = predict_memory(
                executor.model, executor.config, compute_dtype(executor.model)
            )
            if self._layerwise is None:  # else all ranks would have to take part
                memory, line = measured_memory(executor, memory)
                drop_unreduced_gradients(executor.model)
                self.logger.info(line)
            self._memory = memory
        return self._memory

    def _pending_bytes(self) -> float:
        trainable = [p for p in self.executor.model.parameters() if p.requires_grad]
        optimizer = self._optimizer
        return pending_bytes(
            group_bytes(self.executor.model),
            sum(p.numel() for p in trainable),
            dist.get_world_size(self._group),
            trains=optimizer is not None,
            has_moments=optimizer is None or bool(optimizer.state),
            is_layerwise=self._layerwise is not None,
        )


def _longest(tree: PrefixTree) -> int:
    return max(map(tree.sequence_length, range(tree.num_sequences)), default=0)
