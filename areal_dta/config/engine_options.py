"""Options of the tree engine (``actor.dta``). Light: read at start-up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from areal_dta.schedule import DEFAULT_BLOCK_TOKENS

_CHOICES: Final = {
    "positions": ("auto", "all"),
    "loss_scope": ("auto", "sequence", "batch"),
    "fuse_prox_logp": ("auto", "false"),
    "reshard": ("step", "block"),
}


@dataclass
class DTAOptions:
    """How the tree engine runs. No value changes results beyond rounding.

    Raises:
        ValueError: a value is out of range; the message names its key.
    """

    block_tokens: int | str = field(
        default=DEFAULT_BLOCK_TOKENS,
        metadata={"help": "Most tokens of one call of the model; auto fits memory."},
    )
    retain_tokens: int | str | None = field(
        default=None,
        metadata={
            "help": "Most tokens whose graph is kept instead of recomputed; null keeps "
            "all (fastest), 0 keeps none (least memory), auto fits memory."
        },
    )
    positions: str = field(
        default="auto",
        metadata={
            "help": "What is computed: auto only what the loss reads, where that is "
            "known; all everything."
        },
    )
    loss_scope: str = field(
        default="auto",
        metadata={
            "help": "When the loss is evaluated: sequence block by block, batch once "
            "(one more forward); auto takes sequence where that is exact."
        },
    )
    fuse_prox_logp: str = field(
        default="auto",
        metadata={
            "help": "auto takes the proximal logprobs from the update itself where "
            "that is exact, and saves a forward pass; false never."
        },
    )
    reshard: str = field(
        default="step",
        metadata={
            "help": "Parameters of several ranks: step gathers them for a whole pass; "
            "block layer by layer, with ranks in step, for models that do not fit."
        },
    )

    router_load: bool = field(
        default=False,
        metadata={
            "help": "Of a mixture of experts: log how unevenly they are chosen, as "
            "dta/expert_load_max_over_mean."
        },
    )

    def __post_init__(self) -> None:
        for name, least in (("block_tokens", 1), ("retain_tokens", 0)):
            value = getattr(self, name)
            if value == "auto" or (value is None and name == "retain_tokens"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                also = ", null" if name == "retain_tokens" else ""
                raise ValueError(
                    f"dta.{name}={value}; expected a whole number >= {least}{also} or "
                    "auto"
                )
        # YAML reads an unquoted false as a boolean.
        self.fuse_prox_logp = str(self.fuse_prox_logp).lower()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"dta.{name}={value}; expected {' or '.join(choices)}")


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
