"""What each rank runs for test_fsdp_gather_layer.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from areal_dta.engine.fsdp_gather_layer import LayerwiseGather
from areal_dta.engine.fsdp_gather_step import PeerFailure
from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.engine.ranks import COLLECTIVE_TIMEOUT
from tests.models import VOCAB_SIZE, tiny_model

NUM_LAYERS = 4
BUDGETS = {"recompute": (5, 0), "some": (7, 16), "retain": (6, None)}
MODELS = {
    "untied": ("qwen3", {}),
    "tied": ("qwen3-tied", {}),
    "experts": ("qwen3_moe", {"num_experts": 16}),
    "states": ("qwen3_5_text", {}),
}


def build_model(name: str) -> Any:
    architecture, sizes = MODELS[name]
    # Gates have gradients that are small differences of large terms: in fp32 dense
    # training is itself 7.5e-5 from fp64 there.
    dtype = torch.float64 if name == "states" else torch.float32
    return tiny_model(architecture, dtype, num_hidden_layers=NUM_LAYERS, **sizes)


def full_batch() -> list[list[int]]:
    return random_batch(np.random.default_rng(5), 14, 30, VOCAB_SIZE)


def rows_of_rank(split: str, rank: int, world_size: int) -> list[int]:
    rows = list(range(len(full_batch())))
    if world_size == 1:
        return rows
    return {
        "uneven": [rows[:11], rows[11:]],
        "empty": [rows, []],
        "first_empty": [[], rows],
    }[split][rank]


def loss_of(rows: list[int]) -> Callable[..., torch.Tensor]:
    """Return a loss that depends on a row's index in the full batch: ranks add up."""

    def sequence_loss(index: int, logprobs: Any, entropy: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rows[index])
        weight = torch.randn(len(logprobs), generator=generator)
        return (logprobs * weight).sum() + 0.3 * (entropy**2 * weight).sum()

    return sequence_loss


def shard(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if not model.config.tie_word_embeddings:
        fully_shard(model.model.embed_tokens, **options)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def run_all(rank: int, directory: Path) -> dict[str, Any]:
    return Scenarios(rank, dist.get_world_size()).all()


class Scenarios:
    """Each method runs on all ranks at once and returns what the test looks at."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.group = dist.new_group(timeout=COLLECTIVE_TIMEOUT, backend="gloo")

    def all(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for split in ("uneven", "empty", "first_empty"):
            for name in MODELS:
                for budgets in BUDGETS:
                    if name == "untied" or budgets == "some":
                        key = f"{name}-{split}-{budgets}"
                        print(key, flush=True)
                        results[key] = self.train(name, split, budgets)
        for key in ("batch_scope", "forward", "failing_loss", "twice"):
            print(key, flush=True)
            results[key] = getattr(self, key)()
        return results

    def train(self, name: str, split: str, budgets: str) -> dict[str, Any]:
        executor, pace = self._executor(name, BUDGETS[budgets])
        rows, tree = self._tree(split)
        with self._counting_gathered(executor.model) as gathered, pace.training_pass():
            value = executor.forward_backward(tree, loss_of(rows))
        grads = _gradients(executor.model)
        return {"loss": value, "gradients": grads, "gathered": max(gathered)}

    def batch_scope(self) -> dict[str, Any]:
        executor, pace = self._executor("untied", BUDGETS["some"])
        rows, tree = self._tree("empty")
        single = loss_of(rows)

        def group_loss(indices: list[int], *outputs: list[torch.Tensor]) -> Any:
            return sum(map(single, indices, *outputs))

        with pace.training_pass():
            executor.forward_backward_groups(tree, group_loss, scope="batch")
        return {"gradients": _gradients(executor.model)}

    def forward(self) -> list[list[torch.Tensor]]:
        results = []
        for split in ("uneven", "empty"):
            executor, pace = self._executor("untied", BUDGETS["some"])
            _, tree = self._tree(split)
            with pace.forward_pass():
                results.append([x.logprobs for x in executor.forward(tree)])
        return results

    def failing_loss(self) -> dict[str, Any]:
        """The last rank's loss fails; then all goes on as if nothing had been."""
        executor, pace = self._executor("untied", BUDGETS["some"])
        rows, tree = self._tree("uneven")

        def failing(index: int, *outputs: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("no loss today")

        is_last = self.rank == self.world_size - 1
        error = "none"
        try:
            with pace.training_pass():
                executor.forward_backward(tree, failing if is_last else loss_of(rows))
        except (ArithmeticError, PeerFailure) as caught:
            error = f"{type(caught).__name__}: {caught}"
        with pace.training_pass():
            executor.forward_backward(tree, loss_of(rows))
        return {"error": error, "gradients": _gradients(executor.model)}

    def twice(self) -> dict[str, Any]:
        """Gradients of two traversals of one pass add up."""
        executor, pace = self._executor("tied", BUDGETS["retain"])
        rows, tree = self._tree("uneven")
        with pace.training_pass():
            for _ in range(2):
                executor.forward_backward(tree, loss_of(rows))
        return {"gradients": _gradients(executor.model)}

    def _executor(
        self, name: str, budgets: Any
    ) -> tuple[TreeExecutor, LayerwiseGather]:
        model = shard(build_model(name))
        executor = TreeExecutor(model, ExecutorConfig(*budgets))
        pace = LayerwiseGather(model, self.group)
        executor.pace = pace
        return executor, pace

    def _tree(self, split: str) -> tuple[list[int], PrefixTree]:
        rows = rows_of_rank(split, self.rank, self.world_size)
        return rows, PrefixTree.from_sequences([full_batch()[r] for r in rows])

    @contextmanager
    def _counting_gathered(self, model: Any) -> Iterator[list[int]]:
        """How many layers are gathered at once, seen from each layer's forward and
        each layer's gradients."""
        layers = [m for m in model.model.layers if isinstance(m, FSDPModule)]
        counts = [0]

        def count(*args: Any) -> None:
            groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers]
            counts.append(sum(group.is_unsharded for group in groups))

        def after(module: Any, args: Any, output: torch.Tensor) -> None:
            count()
            if output.requires_grad:
                output.register_hook(lambda grad: count())

        handles = [layer.register_forward_hook(after) for layer in layers]
        try:
            yield counts
        finally:
            for handle in handles:
                handle.remove()


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    grads = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor), name
        grads[name] = p.grad.full_tensor().clone()
    return grads
