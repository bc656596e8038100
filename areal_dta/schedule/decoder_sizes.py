"""Sizes of a decoder that its costs depend on, read from its Hugging Face config.

A layer mixes tokens by attention, by a state, or by both (Falcon-H1), and has an MLP or
not (Mamba-2; Nemotron-H, whose layers are one of the two). Counted are multiplications
by matrices, so biases and norms are not, and the convolutions and the states of layers
that carry one. tests/schedule/test_flops.py compares the matrices with those of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ATTENTION = frozenset({"full_attention", "sliding_attention", "attention"})
_TOKENWISE = frozenset({"mlp", "moe"})
_GATED_ATTENTION = ("qwen3_next", "qwen3_5")
"""Beginnings of model types whose queries bring a gate as wide as they are."""
_MAMBA_NAMES = {
    "heads": ("mamba_n_heads", "mamba_num_heads", "num_heads"),
    "head_dim": ("mamba_d_head", "mamba_head_dim", "head_dim"),
    "state": ("mamba_d_state", "ssm_state_size", "state_size"),
    "groups": ("mamba_n_groups", "n_groups"),
    "width": ("mamba_d_conv", "conv_kernel"),
}
"""What the families call a size of Mamba-2, in order."""


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Sizes of a decoder, and multiplications per token."""

    hidden: int
    layers: int
    heads: int
    """0 where no layer attends, as ``kv_heads`` and ``head_dim``."""
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    experts: int
    """0 without a mixture."""
    active_experts: int
    """Experts per token; 1 without a mixture."""
    attention_layers: int
    """Layers that attend."""
    attention_products: int
    """Projections of all layers that attend."""
    state_products: int
    """Projections, convolutions and scans of all layers that carry a state."""
    scan_products: int
    """The part of them that works on chunks of segments (states of a scan)."""
    mlp_products: int
    """All MLPs: of a mixture the experts of a token, its router and shared experts."""

    @classmethod
    def from_config(cls, config: Any) -> DecoderSizes:
        """Read a Hugging Face config. Raises as ``config_size``."""
        read = _Reader(text_config(config))
        hidden, kinds = read.size("hidden_size"), read.kinds()
        num_attention = sum(kind in _ATTENTION for kind in kinds)
        heads = kv_heads = head_dim = 0
        if num_attention:
            heads = read.size("num_attention_heads")
            kv_heads = read.size("num_key_value_heads", heads)
            head_dim = read.size("head_dim", hidden // heads)
        gate = heads * read.type.startswith(_GATED_ATTENTION)
        attention = hidden * head_dim * (2 * heads + gate + 2 * kv_heads)
        scans = projections = 0
        for kind, products in read.PRODUCTS.items():
            if count := kinds.count(kind):
                projection, scan = products(read, hidden)
                projections += count * (projection + scan)
                scans += count * scan
        experts, active, intermediate, mlp = read.mlps(hidden, kinds)
        return cls(
            hidden=hidden,
            layers=read.size("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            experts=experts,
            active_experts=active,
            attention_layers=num_attention,
            attention_products=num_attention * attention,
            state_products=projections,
            scan_products=scans,
            mlp_products=mlp,
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    config: Any

    @property
    def type(self) -> str:
        return str(getattr(self.config, "model_type", ""))

    def size(self, name: str, default: int | None = None) -> int:
        return config_size(self.config, name, default)

    def optional(self, name: str) -> int:
        """Return a size that a config may lack; 0 then."""
        return self.size(name) if getattr(self.config, name, None) else 0

    def kinds(self) -> list[str]:
        """Return what each layer is. Falcon-H1's are two things: twice as many."""
        num_layers = self.size("num_hidden_layers")
        if self.type == "mamba2":
            return ["mamba"] * num_layers
        if self.type == "falcon_h1":
            return ["mamba", "attention"] * num_layers
        if (indices := getattr(self.config, "attn_layer_indices", None)) is not None:
            return ["attention" if i in indices else "mamba" for i in range(num_layers)]
        for name in ("layers_block_type", "layer_types"):
            if kinds := getattr(self.config, name, None):
                known = {*_ATTENTION, *_TOKENWISE, *self.PRODUCTS}
                # Others, such as chunked attention, are refused: any price will do.
                return [k if k in known else "attention" for k in kinds]
        return ["attention"] * num_layers

    def mlps(self, hidden: int, kinds: list[str]) -> tuple[int, int, int, int]:
        """Return experts, those of a token, width, and products of all MLPs."""
        if self.type == "mamba2":
            return 0, 1, 0, 0
        width, shared = self._width(), 0
        matrices = 2 if self.type == "nemotron_h" else 3
        num_layers, num_dense = self.size("num_hidden_layers"), 0
        if self.type == "nemotron_h":
            num_layers = kinds.count("moe") + kinds.count("mlp")
            num_dense = kinds.count("mlp")
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next(filter(None, map(self.optional, names)), 0)
        if experts and self.type == "nemotron_h":
            shared = self.optional("moe_shared_expert_intermediate_size")
        if self.type == "granitemoehybrid":
            shared = self.optional("shared_intermediate_size")
            width = width if experts else 0
        if experts and self.type.startswith(_GATED_ATTENTION):
            shared = self.optional("shared_expert_intermediate_size")
        if not experts or not num_layers - num_dense:
            return 0, 1, width, num_layers * matrices * hidden * (width + shared)
        if self.type == "lfm2_moe":
            num_dense = self.optional("num_dense_layers")
        expert = self.size("moe_intermediate_size", width)
        active = self.size("num_experts_per_tok")
        latent = self.optional("moe_latent_size")
        mixture = matrices * (latent or hidden) * expert * active
        mixture += matrices * hidden * shared + hidden * (experts + 2 * latent)
        if shared and self.type.startswith(_GATED_ATTENTION):
            mixture += hidden  # the gate of the shared expert
        products = (num_layers - num_dense) * mixture
        products += num_dense * matrices * hidden * width
        return experts, active, expert, products

    def _width(self) -> int:
        width = self.size("intermediate_size")
        if self.type == "lfm2" and getattr(
            self.config, "block_auto_adjust_ff_dim", True
        ):
            width = 2 * width // 3
            scale = getattr(self.config, "block_ffn_dim_multiplier", None)
            if scale is not None:
                width = int(scale * width)
                multiple = self.size("block_multiple_of", 1)
                width = -(-width // multiple) * multiple
        return width

    def _delta(self, hidden: int) -> tuple[int, int]:
        """Return products of Gated DeltaNet per token: projections, and scan."""
        keys = self.size("linear_num_key_heads") * self.size("linear_key_head_dim")
        value_heads = self.size("linear_num_value_heads")
        values = value_heads * self.size("linear_value_head_dim")
        width = self.size("linear_conv_kernel_dim", 4)
        # The gate is as wide as the values; the state is read twice and written once.
        projections = hidden * (2 * keys + 3 * values + 2 * value_heads)
        convolution = width * (2 * keys + values)
        return projections + convolution, 3 * values * self.size("linear_key_head_dim")

    def _mamba(self, hidden: int) -> tuple[int, int]:
        """Return the same of Mamba-2, whose state is read and written once."""
        size = {name: self._first(names) for name, names in _MAMBA_NAMES.items()}
        inner = size["heads"] * size["head_dim"]
        mixed = inner + 2 * size["groups"] * size["state"]
        projections = hidden * (inner + mixed + size["heads"] + inner)
        return projections + size["width"] * mixed, 2 * inner * size["state"]

    def _first(self, names: tuple[str, ...]) -> int:
        found = [name for name in names if getattr(self.config, name, None)]
        return self.size(found[0] if found else names[0])

    def _convolution(self, hidden: int) -> tuple[int, int]:
        """Return the same of LFM2's: projections to three parts, and back."""
        return 4 * hidden**2 + self.size("conv_L_cache", 3) * hidden, 0

    PRODUCTS = {
        "linear_attention": _delta,
        "mamba": _mamba,
        "conv": _convolution,
    }


def text_config(config: Any) -> Any:
    """Return the part of a (possibly multimodal) Hugging Face config about text."""
    return getattr(config, "get_text_config", lambda: config)()


def config_size(config: Any, name: str, default: int | None = None) -> int:
    """Return a size of a Hugging Face config.

    Raises:
        ValueError: neither the config nor ``default`` has it, or it differs by layer.
    """
    value = getattr(config, name, None) or default
    if value is None:
        raise ValueError(
            f"{type(config).__name__} has no `{name}`, so its cost cannot be "
            "predicted; expected the config of a decoder-only language model"
        )
    if not isinstance(value, int):
        raise ValueError(
            f"{type(config).__name__}.{name}={value!r:.60}, so its cost cannot be "
            "predicted; expected one number for all layers"
        )
    return value
