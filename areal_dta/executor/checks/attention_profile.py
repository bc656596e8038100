"""What each layer of a model asks of its attention, learned from one short call.

Transformers tells attention who sees whom by several channels: the mask, arguments of
the call, attributes of the module. Its attention functions read different ones, and a
block gets no mask. So the model runs once on a short sequence, under an attention that
records all channels. The mask function decides about windows, because the model's own
eager attention reads it alone; and what a block would compute is compared with eager
attention on the same queries and keys, whatever options that reads.

The same call tells whether the model draws random numbers (randomness.py).

Invariants, and the tests that hold them: windows and scales known by one channel are
exact, and what a block cannot give is refused by name (test_attention_profile.py).
"""

# S = tokens of the call, N = query heads, K = key/value heads, H = head dim

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask

from areal_dta.executor.attention import (
    BlockAttention,
    LayerAttention,
    attend,
    model_attention,
    requested,
)
from areal_dta.executor.checks.randomness import Prints, check_randomness, fingerprints
from areal_dta.executor.kernels import Mask, accumulation_dtype
from areal_dta.executor.kv_cache import PathCache
from areal_dta.executor.model_refusals import (
    REMEDY,
    UnsupportedModelError,
    check_attention_call,
    class_name,
    layer_name,
    model_inputs,
)
from areal_dta.executor.states.kinds import layers_without_attention

_PROBE_NAME = "areal_dta_probe"
_NUM_TOKENS = 16
# Two ways to compute the same attention in fp32 differ by about 1e-6.
_TOLERANCE = 1e-4
_FARTHEST = 2**20
"""Windows that are longer than this count as none."""


@dataclass(slots=True)
class _Probe:
    """One call of the model under the recording attention."""

    block: BlockAttention
    num_layers: int
    masks: list[tuple[Tensor, Callable[..., Any]]] = field(default_factory=list)
    """The masks that the model was given, with the functions behind them."""
    num_calls: int = 0
    layers: dict[int, LayerAttention] = field(default_factory=dict)

    def window(self, module: nn.Module, mask: Tensor | None, asked: Any) -> int | None:
        """Return the window of a layer: its mask function decides, else its call."""
        if mask is None:
            if self.masks:
                _refuse(module, "it attends without the mask that the model builds")
            return asked
        for known, function in self.masks:
            is_view = known.data_ptr() == mask.data_ptr()
            if is_view or (known.shape == mask.shape and torch.equal(known, mask)):
                try:
                    return window_of(function)
                except ValueError as error:
                    _refuse(module, f"its attention mask {error}")
        _refuse(module, "it builds an attention mask of its own")
        raise AssertionError


_active_probe: ContextVar[_Probe | None] = ContextVar(
    "areal_dta_active_probe", default=None
)


def profile_attention(
    model: PreTrainedModel, find_randomness: bool
) -> dict[int, LayerAttention]:
    """Return what each layer asks of its attention, by layer index.

    Calls the model, so parameters must be gathered, or all ranks must take part.

    Args:
        find_randomness: call it with other seeds too, and refuse a difference.

    Raises:
        UnsupportedModelError: a layer needs what a block cannot give, or the model
            draws random numbers.
    """
    device = next(model.parameters()).device
    config = model.config.get_text_config()
    vocab_size = config.vocab_size
    # Not from token 0 on: a first token of padding hides positions that start at 1.
    token_S = (torch.arange(_NUM_TOKENS, device=device) * 7 + 1) % vocab_size
    depth_S = torch.arange(_NUM_TOKENS, device=device)
    num_layers = config.num_hidden_layers
    seen = torch.ones(_NUM_TOKENS, _NUM_TOKENS, dtype=torch.bool, device=device)
    probe: _Probe

    def call(**arguments: Any) -> Prints:
        nonlocal probe
        block = BlockAttention(
            path=PathCache(range(num_layers), 0, with_grad=False),
            path_tokens=0,
            depth_S=depth_S,
            depths=(0, _NUM_TOKENS - 1),
            mask=Mask(visible=seen.tril()),
            kernel_name="masked_softmax",
            keep_kv=False,
            layers={},
        )
        probe = _Probe(block, num_layers)
        token = _active_probe.set(probe)
        try:
            with fingerprints(model) as found:
                model(**arguments)
        finally:
            _active_probe.reset(token)
        return found

    cuda = [device] if device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=cuda),
        model_attention(model, _PROBE_NAME),
    ):
        inputs = model_inputs(model, token_S, depth_S)
        without_positions = {k: v for k, v in inputs.items() if "position" not in k}
        torch.manual_seed(0)
        own = call(**without_positions)  # the model's own idea of positions
        torch.manual_seed(0)
        given = call(**inputs)
        _check_calls(probe, layers_without_attention(model))
        if find_randomness:
            check_randomness(model, lambda: call(**inputs))
    _check_positions(model, own, given)
    return probe.layers


def _check_calls(probe: _Probe, without: set[int]) -> None:
    num_layers, num_calls = probe.num_layers, probe.num_calls
    is_known = set(probe.layers) | without == set(range(num_layers))
    if num_calls == len(probe.layers) and is_known:
        return
    raise UnsupportedModelError(
        f"{num_calls} of {num_layers} layers called the attention interface; expected "
        "one call per layer of config.num_hidden_layers: the model mixes tokens "
        "outside attention (SSM, linear attention), has its own attention code, or "
        f"more layers than its config says; {REMEDY}"
    )


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """Return the number of tokens that a query sees, itself included; None: all.

    Args:
        mask_function: called as ``(batch, head, query, key)``, as Transformers does.

    Raises:
        ValueError: the mask is neither causal nor a causal sliding window.
    """
    zero = torch.zeros((), dtype=torch.int64)

    def sees(query: int, distance: Tensor) -> Tensor:
        q = torch.tensor(query)
        visible = mask_function(zero, zero, q, q - distance)
        return torch.as_tensor(visible).expand(distance.shape)

    # Distances that are looked at: all short ones, and those around powers of two.
    powers = 2 ** torch.arange(10, 21)
    far = torch.cat([powers - 1, powers, powers + 1]).sort().values
    distances = torch.cat([torch.arange(0, 513), far])
    try:
        if bool(sees(_FARTHEST, -torch.arange(1, 65)).any()):
            raise ValueError("is not causal")
        is_seen = sees(2 * _FARTHEST, distances)
        if bool(is_seen.all()):
            window = None
        else:
            # Bisection: the last distance that is seen, the first that is not.
            first = int(is_seen.to(torch.int8).argmin())
            low = int(distances[first - 1]) if first else -1
            high = int(distances[first])
            while high - low > 1:
                middle = (low + high) // 2
                if bool(sees(2 * _FARTHEST, torch.tensor([middle]))):
                    low = middle
                else:
                    high = middle
            window = high
        # A window moves with its query; a chunk does not.
        if window is not None:
            distances = torch.cat([distances, torch.tensor([window - 1, window])])
        wanted = distances < (4 * _FARTHEST if window is None else window)
        for query in (2 * _FARTHEST, 2 * _FARTHEST + 1, 2 * _FARTHEST + 4099):
            if not torch.equal(sees(query, distances), wanted):
                raise ValueError("is no causal sliding window (chunks, for example)")
    except (IndexError, RuntimeError):
        raise ValueError("depends on more than positions") from None
    if window == 0:
        raise ValueError("lets no token see itself")
    return window


def _recording_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    probe = _active_probe.get()
    assert probe is not None
    if "allow_is_bidirectional_skip" in kwargs:
        kwargs["allow_is_bidirectional_skip"] = False
    mask: Tensor | None = eager_mask(*args, **kwargs)
    if mask is not None:
        function = kwargs.get("mask_function", causal_mask_function)
        probe.masks.append((mask, function))
    return mask


def _recording_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    probe = _active_probe.get()
    assert probe is not None
    check_attention_call(module, query, key, _NUM_TOKENS, None, dropout, kwargs)
    probe.num_calls += 1
    if getattr(module, "layer_idx", None) is None:
        _refuse(module, "it does not say which layer it is (layer_idx)")
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
    if layer_idx >= probe.num_layers:
        _refuse(module, f"config.num_hidden_layers={probe.num_layers} does not have it")
    layer = LayerAttention(
        asked=requested(scaling, kwargs),
        window=probe.window(module, attention_mask, kwargs.get("sliding_window")),
        scale=_scale(module, scaling, query.shape[-1]),
        softcap=kwargs.get("softcap"),
    )
    probe.layers[layer_idx] = layer
    # What a block computes, and what the model's own eager attention does.
    acc = accumulation_dtype(query.dtype)
    q, k, v = query.to(acc), key.to(acc), value.to(acc)
    ours = attend(probe.block, layer_idx, layer, q, k, v, kwargs.get("s_aux"))
    eager = getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", None
    )
    if eager is None:
        return ours.to(query.dtype), None
    if attention_mask is None:
        hidden = torch.finfo(acc).min
        seen = probe.block.mask.matrix
        assert seen is not None  # the probe's block is a plain matrix
        attention_mask = torch.zeros_like(seen, dtype=acc).masked_fill(~seen, hidden)
        attention_mask = attention_mask[None, None]
    options = kwargs if scaling is None else {"scaling": scaling, **kwargs}
    theirs = eager(module, q, k, v, attention_mask, dropout=0.0, **options)[0]
    difference = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))
    if not difference <= _TOLERANCE:
        _refuse(
            module,
            f"its eager attention differs from a block's by {difference:.1e} "
            f"(relative, {_NUM_TOKENS} tokens): an option that only the module knows",
        )
    return theirs.to(query.dtype), None


def _scale(module: Any, scaling: float | None, head_dim: int) -> float:
    """Return the factor of the scores: also GPT-2's, which only eager reads."""
    scale = scaling if scaling is not None else head_dim**-0.5
    if getattr(module, "scale_attn_weights", True) is False:
        scale = 1.0
    if getattr(module, "scale_attn_by_inverse_layer_idx", False):
        scale /= module.layer_idx + 1
    return scale


AttentionInterface.register(_PROBE_NAME, _recording_attention)
AttentionMaskInterface.register(_PROBE_NAME, _recording_mask)


def _refuse(module: nn.Module, problem: str) -> None:
    raise UnsupportedModelError(
        f"{layer_name(module)} cannot run on a prefix tree: {problem}; {REMEDY}"
    )


def _check_positions(model: nn.Module, own: Prints, given: Prints) -> None:
    eps = torch.finfo(next(model.parameters()).dtype).eps
    for (name, a), (_, b) in zip(own, given, strict=False):
        if float(abs(a - b)) > 8 * eps * float(a):
            raise UnsupportedModelError(
                f"{class_name(model)} cannot run on a prefix tree: {name} "
                f"({class_name(model.get_submodule(name))}) counts positions in its "
                "own way (for example from the padding token on), not by the depth of "
                f"a token; {REMEDY}"
            )
