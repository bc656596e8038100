"""FSDP2 without lock-step: a rank calls its model as often as its own tree needs.

FSDP2 gathers parameters before and reduces gradients after every call, with every
rank, so ranks with different trees would wait for one another for ever. Here all
gathering is done at the start of a pass and all reduction at its end, each once and
in the same order on every rank, one with nothing to compute included:

1. gradient synchronisation and resharding off, every FSDP module unsharded;
2. any number of forwards and backwards, without communication;
3. training: synchronisation on, and one backward of zero loss that touches every
   trainable parameter, so that what has accumulated is reduced and resharded;
   forward only: a local reshard.

Cost: the whole model unsharded during a pass, and when training its gradients in the
reduction dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


class PeerFailure(RuntimeError):
    """Another rank failed during the pass, so its gradients cannot be reduced."""


@contextmanager
def forward_pass(model: nn.Module) -> Iterator[None]:
    """Any number of forward calls on each rank. Collective at its start only."""
    try:
        _unshard(model)
        yield
    except Exception:
        forget(model)
        raise
    finally:
        _reshard(model)


@contextmanager
def training_pass(model: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Any number of forwards and backwards on each rank, then reduced gradients.

    Collective at its start and its end. ``group``: a CPU group of all ranks, over
    which a rank that fails tells the others instead of letting them wait.

    Raises:
        PeerFailure: another rank failed; this one has dropped its gradients too.
    """
    try:
        _unshard(model)
        try:
            yield
        except Exception:
            _count_failures(group, failed=True)
            raise
        raise_if_any_failed(group)
        _reduce_gradients(model)
    except Exception:
        forget(model)
        raise
    finally:
        _reshard(model)


def raise_if_any_failed(group: dist.ProcessGroup) -> None:
    """Told by a rank that has not failed itself. Collective.

    Raises:
        PeerFailure: another rank has.
    """
    if num_failed := _count_failures(group, failed=False):
        raise PeerFailure(
            f"{num_failed} of {dist.get_world_size(group)} ranks failed during "
            "training on their trees (this one did not); see their logs"
        )


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    modules: list[FSDPModule] = [
        m for m in model.modules() if isinstance(m, FSDPModule)
    ]
    assert modules, "the model is not wrapped by FSDP2's fully_shard"
    return modules


def _unshard(model: nn.Module) -> None:
    root: Any = model
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_forward(False)
    root.set_reshard_after_backward(False)
    for module in _fsdp_modules(model):
        module.unshard()


def _reshard(model: nn.Module) -> None:
    root: Any = model
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_forward(True)
    # FSDP2 itself leaves the root unsharded between forward and backward.
    root.set_reshard_after_forward(False, recurse=False)
    root.set_reshard_after_backward(True)
    for module in _fsdp_modules(model):
        module.reshard()


def _count_failures(group: dist.ProcessGroup, failed: bool) -> int:
    count = torch.tensor([int(failed)])
    dist.all_reduce(count, group=group)
    return int(count.item())


@torch.enable_grad()
def _reduce_gradients(model: nn.Module) -> None:
    """Reduce-scatter what has accumulated, by the smallest backward there is."""
    root: Any = model
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    for parameter in model.parameters():
        # Ranks must reduce the same parameters, those included that one token
        # does not reach, such as a mixture's other experts.
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    device = next(model.parameters()).device
    token = torch.zeros((1, 1), dtype=torch.long, device=device)
    logits = model(input_ids=token, use_cache=False).logits
    (logits.sum() * 0.0).backward()


def forget(model: nn.Module) -> None:
    """After a failure: drop gradients that were not reduced, and be idle again.

    FSDP2 has no public call for this, so its private state is set (torch 2.9, 2.10);
    without it the next pass would add to the gradients of the broken one.
    """
    forget_order(model)
    for module in _fsdp_modules(model):
        state: Any = module._get_fsdp_state()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        group = state._fsdp_param_group
        if group is None:
            continue
        group._training_state = idle
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def forget_order(model: nn.Module) -> None:
    """Drop FSDP2's record of forwards, by which it prefetches for their backwards."""
    for module in _fsdp_modules(model):
        state: Any = module._get_fsdp_state()
        group = state._fsdp_param_group
        # the record is made when the root runs for the first time
        if group is not None and hasattr(group.comm_ctx, "post_forward_order"):
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
