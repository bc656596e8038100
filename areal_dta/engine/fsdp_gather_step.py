"""FSDP2 gathering once per step: a rank calls its model as often as its tree needs.

FSDP2 gathers parameters before every call and reduces gradients after it, with all
ranks, so ranks with different trees would wait for one another for ever. Here all
gathering is done at the start of a pass and all reduction at its end, once and in the
same order on every rank, including a rank with nothing to compute:

1. gradient synchronisation and resharding off, every FSDP module unsharded;
2. any number of forwards and backwards, without communication;
3. training: synchronisation on, and one backward of zero loss that touches every
   trainable parameter, so that what has accumulated is reduced and resharded;
   forward only: a local reshard.

Cost: the whole model unsharded during a pass, and when training its gradients in the
reduction dtype.

A rank that runs out of memory between a collective's start and its end would leave the
others waiting. So each rank first reserves what the gathering, and later the reduction,
will allocate, and tells the others over the CPU group whether it could.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from areal_dta.areal_fixes.fsdp2 import (
    drop_unreduced_gradients,
    fill_missing_gradients,
    fsdp_modules,
    group_bytes,
)
from areal_dta.executor.checks.multimodal import text_inputs
from areal_dta.executor.memory.budget import reserve


class PeerFailure(RuntimeError):
    """Another rank failed during the pass, so its gradients cannot be reduced."""


@contextmanager
def forward_pass(model: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Context manager for any number of forwards on each rank.

    Collective at its start only.

    Raises:
        PeerFailure: another rank has no memory for the parameters.
    """
    try:
        _unshard(model, group)
        yield
    except Exception:
        drop_unreduced_gradients(model)
        raise
    finally:
        _reshard(model)


@contextmanager
def training_pass(model: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Context manager for any number of forwards and backwards on each rank.

    Gradients are reduced at its end. Collective at its start and its end.

    Args:
        group: a CPU group of all ranks, over which a rank that fails tells the others
            instead of letting them wait.

    Raises:
        PeerFailure: another rank failed; this one has dropped its gradients too.
    """
    try:
        _unshard(model, group)
        try:
            yield
            # two groups are in flight at a time: one is copied, one is reduced
            reduced = sorted(n for _, n in group_bytes(model))[-2:]
            reserve(reduced, _device(model))
        except Exception:
            count_failures(group, failed=True)
            raise
        raise_if_any_failed(group)
        _reduce_gradients(model)
    except Exception:
        drop_unreduced_gradients(model)
        raise
    finally:
        _reshard(model)


def raise_if_any_failed(group: dist.ProcessGroup) -> None:
    """Raise if any peer failed; called by a healthy rank. Collective.

    Raises:
        PeerFailure: another rank has failed.
    """
    if num_failed := count_failures(group, failed=False):
        raise PeerFailure(
            f"{num_failed} of {dist.get_world_size(group)} ranks failed during "
            "a pass over their trees (this one did not); see their logs"
        )


def _unshard(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Gather all parameters, if every rank has the memory. Collective."""
    try:
        reserve([n for n, _ in group_bytes(model)], _device(model))
    except Exception:
        count_failures(group, failed=True)
        raise
    raise_if_any_failed(group)
    root: Any = model
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_forward(False)
    root.set_reshard_after_backward(False)
    for module in fsdp_modules(model):
        module.unshard()


def _reshard(model: nn.Module) -> None:
    root: Any = model
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_forward(True)
    # FSDP2 itself leaves the root unsharded between forward and backward.
    root.set_reshard_after_forward(False, recurse=False)
    root.set_reshard_after_backward(True)
    for module in fsdp_modules(model):
        module.reshard()


def count_failures(group: dist.ProcessGroup, failed: bool) -> int:
    """Return the number of ranks that have failed. Collective."""
    count = torch.tensor([int(failed)])
    dist.all_reduce(count, group=group)
    return int(count.item())


@torch.enable_grad()
def _reduce_gradients(model: nn.Module) -> None:
    """Reduce-scatter the accumulated gradients, by the smallest possible backward."""
    root: Any = model
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    # Ranks must reduce the same parameters, also those that one token does not reach,
    # such as a mixture's other experts.
    fill_missing_gradients(model)
    token = torch.zeros((1, 1), dtype=torch.long, device=_device(model))
    inputs = {"input_ids": token, **text_inputs(model, token)}
    logits = model(**inputs, use_cache=False).logits
    if logits.requires_grad:
        (logits.sum() * 0.0).backward()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
