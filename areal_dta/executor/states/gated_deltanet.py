"""Gated DeltaNet: Qwen3-Next, Qwen3.5 (dense and mixtures), OLMo-Hybrid.

Two states: the tail of its convolution (three of them in OLMo-Hybrid), and a matrix per
head that the delta rule reads and writes. Both functions are attributes of the module
in Transformers 5.3, which is where the executor takes over.

On a GPU the delta rule is flash-linear-attention's and the convolution causal-conv1d's
where they are installed and take what is needed (`library_scan`).
"""

# S = block tokens, N = heads, K = key dim, V = value dim

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from areal_dta.executor.states import library_scan
from areal_dta.executor.states.protocol import StatefulLayer, active_states
from areal_dta.executor.states.run_tree import ChunkTree, RunLevels
from areal_dta.executor.states.scan import gated_delta_rule
from areal_dta.executor.states.short_convolution import TAIL, convolution

CLASSES = frozenset(
    {
        "Qwen3NextGatedDeltaNet",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5MoeGatedDeltaNet",
        "OlmoHybridGatedDeltaNet",
    }
)
_EPS = 1e-6
"""Epsilon of the norms of queries and keys, in Transformers as in FLA."""


def gated_deltanet(module: Any) -> StatefulLayer:
    """Describe a module of CLASSES."""
    width, on_gpu = module.conv_kernel_size, module.A_log.is_cuda
    library = library_scan.installed_delta_rule()[0] if on_gpu else None
    if hasattr(module, "conv1d"):
        convolutions = {TAIL: module.conv1d}
        attributes = _whole(module, width, on_gpu)
    else:  # OLMo-Hybrid: one each for queries, keys and values
        convolutions = {f"{TAIL} of {x}": getattr(module, f"{x}_conv1d") for x in "qkv"}
        attributes = [
            (conv, "forward", _split(module, conv, name, width))
            for name, conv in convolutions.items()
        ]
    return StatefulLayer(
        layer_idx=module.layer_idx,
        module=module,
        widths=dict.fromkeys(convolutions, width),
        has_scan=True,
        attributes=[
            *attributes,
            (module, "chunk_gated_delta_rule", _scan(module, library)),
        ],
        state_elements=module.num_v_heads * module.head_k_dim * module.head_v_dim,
        tail_elements=(width - 1) * (2 * module.key_dim + module.value_dim),
        scans_runs=library is not None,
    )


def _whole(module: Any, width: int, on_gpu: bool) -> list[tuple[Any, str, Any]]:
    """Return the attributes by which Qwen's layers reach their convolution."""
    own, name = module.causal_conv1d_fn, "causal_conv1d_fn"
    if not (on_gpu and library_scan.fits_convolution(own)):
        conv = module.conv1d
        forward = convolution(module, conv, TAIL, width)
        return [(module, name, None), (conv, "forward", forward)]

    def causal_conv1d_fn(x: Tensor, **options: Any) -> Tensor:
        def call(x: Tensor) -> Tensor:
            out: Tensor = own(x=x, **options)
            return out

        return active_states().convolve((module.layer_idx, TAIL), x, width, call)

    return [(module, name, causal_conv1d_fn)]


def _split(module: Any, conv: Any, name: str, width: int) -> Callable[..., Any]:
    """Return a forward for a convolution of OLMo-Hybrid: [1, S, D] both ways."""
    own = conv.forward

    def forward(x: Tensor, **options: Any) -> tuple[Tensor, None]:
        def call(x: Tensor) -> Tensor:
            out: Tensor = own(x.transpose(1, 2))[0].transpose(1, 2)
            return out

        key = module.layer_idx, name
        out = active_states().convolve(key, x.transpose(1, 2), width, call)
        return out.transpose(1, 2), None

    return forward


def _scan(module: Any, library: Callable[..., Any] | None) -> Callable[..., Any]:
    def chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """query, key: [1, S, N, K]; value: [1, S, N, V]; g, beta: [1, S, N]."""
        index, num_tokens = module.layer_idx, query.shape[1]
        if library is not None and value.dtype in library_scan.DTYPES:
            inputs = {"q": query, "k": key, "v": value, "g": g, "beta": beta}

            def run_levels(
                levels: RunLevels, entering: Tensor | None
            ) -> tuple[Tensor, list[Tensor]]:
                return library_scan.delta_rule_by_runs(
                    library, levels, inputs, entering, use_qk_l2norm_in_kernel
                )

            out = active_states().scan_runs(index, num_tokens, run_levels)
            return out[None], None
        if use_qk_l2norm_in_kernel:
            query, key = _normed(query), _normed(key)

        def run(
            chunks: ChunkTree, entering: Tensor | None
        ) -> tuple[Tensor, list[Tensor]]:
            return gated_delta_rule(
                chunks, query[0], key[0], value[0], g[0], beta[0], entering
            )

        out = active_states().scan(index, num_tokens, run)
        return out[None], None

    return chunk_gated_delta_rule


def _normed(x: Tensor) -> Tensor:
    return x * (x * x).sum(-1, keepdim=True).add(_EPS).rsqrt()
