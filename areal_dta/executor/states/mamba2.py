"""Mamba-2: Mamba2, Bamba, Nemotron-H, Granite-MoE-hybrid, Falcon-H1.

Two states: the tail of its convolution, and a matrix per head that decays and is added
to. Transformers 5.3 has no seam between the two, so the forward is written here once
for the family: what `torch_forward` of each computes, with the same casts. One thing is
left out: that of Nemotron-H (and Zamba2) adds up the states of chunks over the wrong
axis, so it is right only where a sequence is one chunk (`chunk_size`, 256 tokens by
default). The CUDA kernels are right, and so is the scan here.
"""

# S = block tokens, N = heads, K = state size, V = head dim, G = groups of heads

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from areal_dta.executor.kernels import accumulation_dtype
from areal_dta.executor.states.protocol import StatefulLayer, active_states
from areal_dta.executor.states.run_tree import ChunkTree
from areal_dta.executor.states.scan import state_space
from areal_dta.executor.states.short_convolution import TAIL, convolution

CLASSES = frozenset(
    {
        "Mamba2Mixer",
        "BambaMixer",
        "NemotronHMamba2Mixer",
        "GraniteMoeHybridMambaLayer",
        "FalconH1Mixer",
    }
)
_BOUNDED_BELOW_ONLY = frozenset({"NemotronHMamba2Mixer"})
"""Those whose time steps have a minimum, `time_step_min`, and no other limit."""


def mamba2(module: Any) -> StatefulLayer:
    """Describe a module of CLASSES."""
    width = module.conv_kernel_size
    conv = module.conv1d
    return StatefulLayer(
        layer_idx=module.layer_idx,
        module=module,
        widths={TAIL: width},
        has_scan=True,
        attributes=[
            (conv, "forward", convolution(module, conv, TAIL, width)),
            (module, "forward", functools.partial(_forward, module)),
        ],
        state_elements=module.num_heads * module.ssm_state_size * module.head_dim,
        tail_elements=(width - 1) * module.conv_dim,
    )


def _forward(layer: Any, *args: Any, **options: Any) -> Tensor:
    """Run a mixer on a block, [1, S, hidden size]; caches and masks are not there."""
    hidden: Tensor = args[0] if args else options["hidden_states"]
    # Projections; Falcon-H1 scales them.
    scale = getattr(layer, "ssm_in_multiplier", None)
    projected = layer.in_proj(hidden if scale is None else hidden * scale)
    if (scales := getattr(layer, "mup_vector", None)) is not None:
        projected = projected * scales
    sizes = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
    unused = projected.shape[-1] - sum(sizes)
    _, gate, mixed, dt = projected.split([unused, *sizes], -1)

    mixed = layer.act(layer.conv1d(mixed.transpose(1, 2)).transpose(1, 2))
    groups = layer.n_groups * layer.ssm_state_size
    x, b, c = mixed.split([layer.intermediate_size, groups, groups], -1)

    # Discretized inputs, in fp32 but for the time step.
    dt_SN = torch.nn.functional.softplus(dt + layer.dt_bias)[0]
    dt_SN = dt_SN.clamp(*_time_step_limit(layer))
    acc = accumulation_dtype(x.dtype)
    x_SNV = x[0].unflatten(-1, (-1, layer.head_dim)).to(acc)
    b_SNK, c_SNK = (
        y[0]
        .unflatten(-1, (-1, layer.ssm_state_size))
        .to(acc)
        .repeat_interleave(layer.num_heads // layer.n_groups, 1)
        for y in (b, c)
    )
    log_decay_SN = -torch.exp(layer.A_log.to(acc)) * dt_SN

    def scan(chunks: ChunkTree, entering: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        inputs = x_SNV * dt_SN[..., None], log_decay_SN, b_SNK, c_SNK
        return state_space(chunks, *inputs, entering)

    out_SNV = active_states().scan(layer.layer_idx, hidden.shape[1], scan)
    out = (out_SNV + layer.D[:, None] * x_SNV).flatten(1)[None]
    if getattr(layer, "mamba_rms_norm", True):
        out = layer.norm(out, gate)
    else:
        out = out * torch.nn.functional.silu(gate)
    result: Tensor = layer.out_proj(out.to(hidden.dtype))
    return result


def _time_step_limit(layer: Any) -> tuple[float, float]:
    if type(layer).__name__.removeprefix("FSDP") in _BOUNDED_BELOW_ONLY:
        return layer.time_step_min, float("inf")
    low, high = layer.time_step_limit
    return low, high
