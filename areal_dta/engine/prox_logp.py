"""The proximal logprobs of the decoupled loss, without a forward pass of their own.

With one minibatch an update nothing changes the weights between ``compute_logp`` and
the update's own forward, and there is no dropout. Both give the same logprobs, so the
detached ones of the update serve as proximal ones: exact, one forward less, and free of
the noise between two passes in low precision. The importance weight is then 1 and the
approximate KL 0, by construction.

The configuration is read here, and nothing else: importing this is light.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_RECOMPUTED = ("recompute", "metrics")  # prox_logp_method


def fuses_prox_logp(config: Any) -> bool:
    """Whether an actor on the tree engine can do without ``compute_logp``.

    ``dta.fuse_prox_logp`` (``auto`` or ``false``) decides, and ``auto`` asks for: the
    decoupled loss (the standard one with ``recompute_logprob`` needs them earlier, for
    the advantages), a method that recomputes them, and one minibatch an update (a
    second one would see changed weights).
    """
    options = getattr(config, "dta", None)
    choice = str(getattr(options, "fuse_prox_logp", "auto")).lower()
    if choice not in ("auto", "false"):
        raise ValueError(f"dta.fuse_prox_logp={choice}; expected auto or false")
    return (
        choice == "auto"
        and bool(config.use_decoupled_loss)
        and config.prox_logp_method in _RECOMPUTED
        and config.ppo_n_minibatches == 1
    )


def with_own_prox_logp(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """AReaL's actor loss, given the detached training logprobs as ``prox_logp``."""

    @functools.wraps(loss_fn)
    def fused(logprobs: Any, entropy: Any, mb_input: Any, **kwargs: Any) -> Any:
        mb_input = {**mb_input, "prox_logp": logprobs.detach()}
        return loss_fn(logprobs, entropy, mb_input, **kwargs)

    return fused
