"""A few sequences of a real batch, computed through a tree and one at a time.

``dta.verify_every=N`` does so before every N-th update, with a loss that weighs the
needed outputs at random. The two gradients are reduced like those of an update, so the
shards that each rank compares are those of all ranks' sequences. Every rank takes part
in both passes, whether or not it has rows.

Invariants, and the tests that hold them (tests/engine/test_verify.py): a correct model
is within the tolerance, a wrong one is not; parameters, optimizer and random numbers
after an update are the same bits with and without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from areal.utils import stats_tracker
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_dta.areal_fixes.fsdp2 import compute_dtype
from areal_dta.engine.fsdp_gather_step import PeerFailure
from areal_dta.executor import Positions, TreeExecutor, oracle
from areal_dta.executor.memory.budget import is_out_of_memory
from areal_dta.tree import PrefixTree

NUM_SEQUENCES: Final = 4
"""Sequences per rank; neighbours in the batch, which share the most."""
MAX_TOKENS: Final = 4096
"""Longer sequences are left out where shorter ones are: dense training keeps a graph of
the whole sequence."""
# Largest difference of a logprob, 1 - cosine, |relative norm - 1|: ten times and more
# what correct models differ by.
_TOLERANCES: Final = {
    torch.float64: (1e-5, 1e-7, 1e-4),
    torch.float32: (1e-3, 1e-4, 1e-2),
}
_HALF_TOLERANCE: Final = (0.5, 0.02, 0.2)


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """How far the tree's results are from those of single sequences, over all ranks."""

    logprob_difference: float
    """Largest absolute difference; of values for a critic."""
    gradient_cosine: float
    gradient_norm_ratio: float
    """Norm through the tree over the norm of single sequences."""
    num_sequences: int

    def problem(self, dtype: torch.dtype) -> str:
        """Return what is beyond the tolerance of a compute dtype; empty if nothing."""
        outputs, angle, norm = _TOLERANCES.get(dtype, _HALF_TOLERANCE)
        checks = (
            (self.logprob_difference, outputs, "outputs differ by"),
            (1 - self.gradient_cosine, angle, "1 - cosine of the gradients is"),
            (abs(self.gradient_norm_ratio - 1), norm, "norms of gradients differ by"),
        )
        found = [
            f"{what} {value:.2g} (tolerance {limit:g})"
            for value, limit, what in checks
            if not value <= limit  # also NaN
        ]
        return ", ".join(found)

    def record(self, alarm: bool) -> None:
        """Add to the step's statistics, as ``dta/verify_*``."""
        values = {
            f"verify_{name}": float(value)
            for name, value in dataclasses.asdict(self).items()
        }
        stats_tracker.get("dta").scalar(**values, verify_alarm=float(alarm))


def verify_batch(
    executor: TreeExecutor,
    training_pass: Callable[[], AbstractContextManager[None]],
    tree: PrefixTree,
    needed: Positions | None,
    turn: int,
    group: dist.ProcessGroup,
    logger: Any,
) -> None:
    """Compare, record and warn. Collective; leaves no gradients behind.

    Args:
        training_pass: makes the context in which gradients are reduced.
        turn: which sequences are chosen; the same on all ranks.
        group: a CPU group of all ranks.
    """
    device = next(executor.model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            result = _compare(executor, training_pass, tree, needed, turn, group)
    except Exception as error:
        # All ranks come here together: a rank that fails tells its peers.
        if not isinstance(error, PeerFailure) and not is_out_of_memory(error):
            raise
        logger.warning(f"nothing was verified: {str(error).splitlines()[0][:200]}")
        return
    finally:
        _take_gradients(executor.model)
    if result is None:
        return
    problem = result.problem(compute_dtype(executor.model))
    result.record(alarm=bool(problem))
    if problem and dist.get_rank(group) == 0:
        logger.warning(
            f"verification of {result.num_sequences} sequences: {problem}; the tree "
            "engine may be wrong for this model (actor.dta.self_check=true looks for "
            "the layer; actor.backend=fsdp:dN is the dense twin)"
        )


def choose_sequences(tree: PrefixTree, turn: int) -> list[int]:
    """Return a few neighbouring sequences, others at every turn."""
    lengths = [tree.sequence_length(i) for i in range(tree.num_sequences)]
    fit = [i for i, length in enumerate(lengths) if length <= MAX_TOKENS]
    fit = fit or sorted(range(len(lengths)), key=lengths.__getitem__)[:1]
    count = min(NUM_SEQUENCES, len(fit))
    return [fit[(turn * count + k) % len(fit)] for k in range(count)]


def _compare(
    executor: TreeExecutor,
    training_pass: Callable[[], AbstractContextManager[None]],
    tree: PrefixTree,
    needed: Positions | None,
    turn: int,
    group: dist.ProcessGroup,
) -> Verification | None:
    model: Any = executor.model
    chosen = choose_sequences(tree, turn)
    sequences = [tree.sequence(i) for i in chosen]
    is_critic = executor.outputs == "values"
    sizes = [len(sequence) - (not is_critic) for sequence in sequences]
    masks = [needed[i] for i in chosen] if needed is not None else None
    weights = [
        torch.from_numpy(_weights(size, None if masks is None else masks[i], turn + i))
        for i, size in enumerate(sizes)
    ]
    found: list[dict[int, Tensor]] = [{}, {}]

    def weighted(which: int, i: int, output: Tensor) -> Tensor:
        found[which][i] = output.detach()
        return (output * weights[i].to(output)).sum()

    # through the tree
    with training_pass():
        small = PrefixTree.from_sequences(sequences)
        executor.forward_backward(small, lambda i, x, *_: weighted(0, i, x), masks)
    tree_gradients = _take_gradients(model)
    # one at a time
    with training_pass():
        for i, sequence in enumerate(sequences):
            if is_critic:
                output = oracle.value_output(model, sequence).values
            else:
                temperature = executor.config.temperature
                output = oracle.sequence_output(model, sequence, temperature).logprobs
            loss = weighted(1, i, output)
            if loss.requires_grad:
                loss.backward()
    dense_gradients = _take_gradients(model)
    # compare the shards of this rank, and add up
    difference = max(
        (
            float(((found[0][i] - found[1][i]) * (weights[i] != 0).to(x)).abs().max())
            for i, x in found[0].items()
            if len(x)
        ),
        default=0.0,
    )
    sums = torch.zeros(4, dtype=torch.float64)
    for a, b in zip(tree_gradients, dense_gradients, strict=True):
        a, b = a.double(), b.double()
        sums[:3] += torch.stack([(a * b).sum(), (a * a).sum(), (b * b).sum()]).cpu()
    sums[3] = len(sequences)
    largest = torch.tensor(difference, dtype=torch.float64)
    dist.all_reduce(sums, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    product, tree_square, dense_square, count = sums.tolist()
    if not count:
        return None
    both = (tree_square * dense_square) ** 0.5
    return Verification(
        float(largest),
        product / both if both else 1.0,
        (tree_square / dense_square) ** 0.5 if dense_square else 1.0,
        int(count),
    )


def _weights(
    size: int, mask: NDArray[np.bool_] | None, seed: int
) -> NDArray[np.float64]:
    weights = np.random.default_rng(seed).uniform(0.5, 1.5, size)
    return weights if mask is None else weights * mask


def _take_gradients(model: torch.nn.Module) -> list[Tensor]:
    """Return this rank's shards of the gradients, and drop them from the model."""
    taken = []
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            grad = parameter.grad
            taken.append(grad.to_local() if isinstance(grad, DTensor) else grad)
        parameter.grad = None
    return taken
