"""FSDP2's private state: what torch 2.9 and 2.10 have no public call for.

Made for torch 2.9 and 2.10. After a failed pass FSDP2 keeps gradients that were not
reduced and believes that it is in the middle of a backward: the next pass would add to
them (held by the tests of failing ranks in tests/engine/test_two_ranks.py and
tests/engine/test_oom_retry.py). Nothing is replaced, so there is nothing to undo.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` has wrapped, outermost first."""
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    assert modules, "the model is not wrapped by FSDP2's fully_shard"
    return modules


def drop_unreduced_gradients(model: nn.Module) -> None:
    """Make FSDP2 idle again after a failure, without the gradients of the pass."""
    forget_forward_order(model)
    for module in fsdp_modules(model):
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


def fill_missing_gradients(model: nn.Module) -> int:
    """Give zeros to trainable parameters that have no gradient; return their number.

    The model must be unsharded. A gradient that FSDP2 has moved to its accumulator in
    the reduction dtype counts: ``grad is None`` then holds for all parameters, and to
    fill them all would take 2 bytes per parameter and a pass over 10.
    """
    num_filled = 0
    for module in fsdp_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else []:
            whole = parameter.unsharded_param
            has_none = parameter.unsharded_accumulated_grad is None
            if has_none and whole.grad is None and whole.requires_grad:
                whole.grad = torch.zeros_like(whole)
                num_filled += 1
    return num_filled


def group_bytes(model: nn.Module) -> list[tuple[int, int]]:
    """Return, per FSDP module, the bytes of its gathered parameters and of their
    gradients in the dtype of the reduction."""
    sizes: list[tuple[int, int]] = []
    for module in fsdp_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        policy = module._get_fsdp_state()._mp_policy
        gathered = reduced = 0
        for parameter in group.fsdp_params if group is not None else []:
            whole = parameter.sharded_param  # a DTensor, which counts all its shards
            dtype = policy.param_dtype or whole.dtype
            gathered += whole.numel() * dtype.itemsize
            if whole.requires_grad:
                reduced += whole.numel() * (policy.reduce_dtype or dtype).itemsize
        sizes.append((gathered, reduced))
    return sizes


def forget_forward_order(model: nn.Module) -> None:
    """Drop FSDP2's record of forwards, by which it prefetches for their backwards."""
    for module in fsdp_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        # the record is made when the root runs for the first time
        if group is not None and hasattr(group.comm_ctx, "post_forward_order"):
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of FSDP's mixed precision if set, else the parameters'."""
    state = getattr(model, "_get_fsdp_state", lambda: None)()
    dtype = getattr(getattr(state, "_mp_policy", None), "param_dtype", None)
    return dtype or next(model.parameters()).dtype
