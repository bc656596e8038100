"""Options of the tree engine (``actor.dta``). Light: neither torch nor AReaL."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Final

from areal_dta.schedule import DEFAULT_BLOCK_TOKENS

_CHOICES: Final = {
    "positions": ("auto", "all"),
    "loss_scope": ("auto", "sequence", "batch"),
    "fuse_prox_logp": ("auto", "false"),
    "reshard": ("auto", "step", "block"),
    "recompute": ("auto", "none", "mlp"),
    "fused_layers": ("auto", "on", "off"),
    "kernel": (
        "auto",
        "flash_cpu",
        "flash_cuda",
        "masked_softmax",
        "triton_tree",
        "flash_triton",
    ),
}


@dataclass
class DTAOptions:
    """How the tree engine runs. No value but ``router_aux_loss`` changes results beyond
    rounding.

    Raises:
        ValueError: a value is out of range; the message names its key.
    """

    block_tokens: int | str = DEFAULT_BLOCK_TOKENS
    """Maximum number of tokens per call of the model; auto fits it to memory."""
    retain_tokens: int | str | None = None
    """Maximum number of tokens whose autograd graph is kept instead of recomputed: null
    keeps all (fastest), 0 keeps none (least memory), auto fits it to memory."""
    positions: str = "auto"
    """Outputs to compute: auto, those that the loss needs, where that is known; all,
    every output."""
    loss_scope: str = "auto"
    """When the loss is evaluated: sequence, block by block; batch, once, after one more
    forward pass; auto takes sequence where that is exact."""
    fuse_prox_logp: str = "auto"
    """auto takes the proximal logprobs from the update itself where that is exact, and
    saves a forward pass; false never does."""
    recompute: str = "auto"
    """What of an autograd graph is left out and run again in the backward: mlp, MLPs
    and norms (graphs less than half as large); none; auto, where that pays: in graphs
    that wait within retain_tokens, or in all where block_tokens is auto too."""
    reshard: str = "auto"
    """When the ranks gather sharded parameters: step, once per pass; block, layer by
    layer with the ranks in step, for models that do not fit; auto takes step if that
    is predicted to fit."""
    kernel: str = "auto"
    """Attention kernel: auto takes PyTorch's or, on a GPU where it is right and faster,
    flash_triton or triton_tree (docs/kernels.md); flash_cpu, flash_cuda,
    masked_softmax (serves all, slow) and those two can be named."""
    fused_layers: str = "auto"
    """RMSNorm, SwiGLU and rotary embeddings as one Triton kernel each, in the dense
    engine too (docs/kernels.md): auto, on a GPU, those that agree with the model's own
    layers when the engine starts; on, all of them or an error; off, none."""
    router_load: bool = False
    """Log as dta/expert_load_max_over_mean how unevenly the experts of a mixture are
    chosen."""
    router_aux_loss: int | float | str = 0.0
    """Coefficient of the load-balancing loss of a mixture's routers, computed for each
    sequence on its own; auto takes that of the model's configuration if it asks for one
    (output_router_logits, router_aux_loss_coef), 0 trains without, as AReaL does."""
    self_check: bool = True
    """Compare a tiny tree with single sequences through the real model before the first
    training step, and stop if they differ."""
    verify_every: int = 0
    """Before every so many updates, compute a few sequences of the batch a second time,
    one by one, and compare logprobs and gradients (dta/verify_*); 0: never."""
    skipped_dir: str = ""
    """Directory for the batches of skipped updates; set by the trainer, and empty: none
    are written."""

    def __post_init__(self) -> None:
        for name, minimum in (("block_tokens", 1), ("retain_tokens", 0)):
            value = getattr(self, name)
            if value == "auto" or (value is None and name == "retain_tokens"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                also = ", null" if name == "retain_tokens" else ""
                raise ValueError(
                    f"dta.{name}={value}; expected a whole number >= {minimum}{also} "
                    "or auto"
                )
        coefficient = self.router_aux_loss
        is_number = isinstance(coefficient, int | float) and coefficient is not True
        if coefficient != "auto" and not (is_number and 0 <= float(coefficient) < inf):
            raise ValueError(
                f"dta.router_aux_loss={coefficient}; expected a number >= 0 or auto"
            )
        if isinstance(self.verify_every, bool) or self.verify_every < 0:
            raise ValueError(
                f"dta.verify_every={self.verify_every}; expected a whole number >= 0"
            )
        if self.verify_every and self.reshard == "block":
            raise ValueError(
                f"dta.verify_every={self.verify_every} needs the whole model gathered, "
                "for single sequences; use dta.reshard=step, or dta.verify_every=0"
            )
        # YAML reads an unquoted false, on or off as a boolean.
        self.fuse_prox_logp = str(self.fuse_prox_logp).lower()
        switch: dict[Any, str] = {True: "on", False: "off"}
        self.fused_layers = switch.get(self.fused_layers, self.fused_layers)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"dta.{name}={value}; expected {' or '.join(choices)}")

    def nominal_budgets(self) -> tuple[int, int | None]:
        """Return block and retain tokens, for predictions before the engine runs.

        Under auto the engine fits them to its memory: where there is enough, it chooses
        blocks of the default size and keeps all graphs, and so does this.
        """
        block, retain = self.block_tokens, self.retain_tokens
        return (
            block if isinstance(block, int) else DEFAULT_BLOCK_TOKENS,
            retain if isinstance(retain, int) else None,
        )


def fuses_prox_logp(config: Any) -> bool:
    """Return whether an actor on the tree engine can do without ``compute_logp``.

    With ``dta.fuse_prox_logp=auto`` it can if the loss is the decoupled one (the
    standard one with ``recompute_logprob`` needs the logprobs earlier, for the
    advantages), its method recomputes them, and an update has one minibatch (a second
    one would see changed weights). See `areal_dta.engine.loss.with_own_prox_logp`.
    """
    choice = getattr(getattr(config, "dta", None), "fuse_prox_logp", "auto")
    return (
        choice == "auto"
        and bool(config.use_decoupled_loss)
        and config.prox_logp_method in ("recompute", "metrics")
        and config.ppo_n_minibatches == 1
    )


def router_aux_coefficient(choice: float | str, hf_config: Any) -> float:
    """Return the coefficient of the routers' loss that ``dta.router_aux_loss`` means.

    Args:
        hf_config: the model's; under auto its ``router_aux_loss_coef`` holds where
            ``output_router_logits`` is set, as in Transformers.
    """
    if choice != "auto":
        return float(choice)
    text = hf_config.get_text_config()
    if not getattr(text, "output_router_logits", False):
        return 0.0
    return float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0)
