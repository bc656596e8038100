"""The gated delta rule of flash-linear-attention, where it is installed, on a GPU.

It takes whole runs of a block, of any lengths, in one call per depth of runs: each run
begins with the state that the run above it left, which the call returns with a graph.
Transformers' own layers call the same function for one sequence, so what is computed is
what dense training computes there, in the same chunks of 64.

A function is taken by its signature, since some versions swallow arguments that they do
not know. Otherwise, on other devices, and in fp32 and fp64, the scan is `scan.py`'s.
It has not run on a card: `tests/executor/states/test_library_scan.py` has a substitute.
"""

# S = block tokens, R = runs of a depth, N = heads, K = key dim, V = value dim

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from areal_dta.executor.states.run_tree import RunLevels

DTYPES = (torch.float16, torch.bfloat16)
"""In fp32 its products would be rounded to TF32."""
_NEEDED = (
    "q k v g beta initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens"
)
_MUST_BE_OFF = "state_v_first transpose_state_layout head_first use_gate_in_kernel"
"""Options that mean another layout or other inputs; many versions lack them."""
_CONVOLUTION = "x weight bias seq_idx activation"
"""What Transformers gives causal-conv1d, by name."""


def why_unfit(function: Any, needed: str, must_be_off: str = "") -> str | None:
    """Return why a function cannot be called with arguments of these names.

    Args:
        needed: names; a function's ``**kwargs`` do not count, for it may ignore them.
        must_be_off: names that it may lack, and whose default is to be False.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        return f"has no signature ({error})"
    if missing := [name for name in needed.split() if name not in parameters]:
        return f"takes no {', '.join(missing)}"
    positional = inspect.Parameter.POSITIONAL_ONLY
    if unnamed := [n for n in needed.split() if parameters[n].kind is positional]:
        return f"takes no {', '.join(unnamed)} by name"
    for name in must_be_off.split():
        if name in parameters and parameters[name].default is not False:
            return f"has {name}={parameters[name].default!r} by default"
    known = {*needed.split(), *must_be_off.split()}
    for name, parameter in parameters.items():
        is_named = parameter.kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )
        if is_named and name not in known and parameter.default is parameter.empty:
            return f"asks for {name}"
    return None


@functools.cache
def installed_delta_rule() -> tuple[Callable[..., Any] | None, str]:
    """Return `chunk_gated_delta_rule` if it fits, and what is said of it."""
    try:
        function = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "fla":
            return None, "flash-linear-attention is not installed"
        return None, f"flash-linear-attention lacks {error.name}"
    except Exception as error:  # of a package built for something else
        return None, f"flash-linear-attention cannot be imported ({error})"
    if (why := why_unfit(function, _NEEDED, _MUST_BE_OFF)) is not None:
        return None, f"chunk_gated_delta_rule of flash-linear-attention {why}"
    return function, "flash-linear-attention's, in fp16 and bf16"


def fits_convolution(function: Any) -> bool:
    """Return whether causal-conv1d's function takes what Transformers gives it."""
    return function is not None and why_unfit(function, _CONVOLUTION) is None


def delta_rule_by_runs(
    function: Callable[..., Any],
    levels: RunLevels,
    inputs: dict[str, Tensor],
    entering: Tensor | None,
    use_qk_l2norm: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Return outputs [S, N, V], and per depth the states [R, N, K, V] that runs leave.

    Args:
        function: `installed_delta_rule`.
        inputs: q, k [1, S, N, K], v [1, S, N, V], g, beta [1, S, N].
        entering: state [1, N, K, V] at the top, or None: zeros.
    """
    sizes = [level.num_tokens for level in levels.levels]
    parts = {
        name: levels.sort(x[0])[None].split(sizes, 1) for name, x in inputs.items()
    }
    takes_host = "cu_seqlens_cpu" in inspect.signature(function).parameters
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    state = entering
    for i, level in enumerate(levels.levels):
        if level.above is not None:
            state = states[-1].index_select(0, level.above)
        elif state is not None:
            state = state.expand(level.num_runs, *state.shape[1:])
        options: dict[str, Any] = {}
        if level.ends is not None:
            options["cu_seqlens"] = level.ends
            if takes_host:  # spares it a wait for the device
                options["cu_seqlens_cpu"] = level.ends_on_host
        out, left = function(
            **{name: part[i] for name, part in parts.items()},
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm,
            **options,
        )
        outputs.append(out[0])
        states.append(left)
    return levels.restore(torch.cat(outputs)), states
