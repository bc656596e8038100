"""Short convolutions over tokens: those of LFM2, and what other layers share with it.

The state is the *tail*: the last W - 1 inputs. A convolution is computed by the model's
own function, once per block, on all runs with their tails before them: another one
would round differently.
"""

# S = block tokens, D = channels

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from areal_dta.executor.states.protocol import StatefulLayer, active_states

TAIL = "convolution"

CLASSES = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv"})


def short_convolution(module: Any) -> StatefulLayer:
    """Describe `Lfm2ShortConv`: a gated convolution, and no other state."""
    width = module.L_cache

    def forward(hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        out: Tensor = module.slow_forward(hidden_states)  # caches and masks: none here
        return out

    return StatefulLayer(
        layer_idx=module.layer_idx,
        module=module,
        widths={TAIL: width},
        has_scan=False,
        attributes=[
            # The path by `self.conv`, also on CUDA: the other one has no seam.
            (module, "forward", forward),
            (module.conv, "forward", convolution(module, module.conv, TAIL, width)),
        ],
        tail_elements=(width - 1) * module.conv.in_channels,
    )


def convolution(
    layer: Any, conv: nn.Module, name: str, width: int
) -> Callable[[Tensor], Tensor]:
    """Return a forward for a causal `nn.Conv1d` of a layer: [1, D, S] -> [1, D, S]."""
    own = conv.forward

    def forward(x: Tensor) -> Tensor:
        return active_states().convolve((layer.layer_idx, name), x, width, own)

    return forward
