"""The proximal logprobs of the decoupled loss, without a forward pass of their own.

With one minibatch an update nothing changes the weights between ``compute_logp`` and
the update's own forward, and there is no dropout. Both give the same logprobs, so the
detached ones of the update serve as proximal ones: exact, one forward less, and free of
the noise between two passes in low precision. The importance weight is then 1 and the
approximate KL 0, by construction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def with_own_prox_logp(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """AReaL's actor loss, given the detached training logprobs as ``prox_logp``."""

    @functools.wraps(loss_fn)
    def fused(logprobs: Any, entropy: Any, mb_input: Any, **kwargs: Any) -> Any:
        mb_input = {**mb_input, "prox_logp": logprobs.detach()}
        return loss_fn(logprobs, entropy, mb_input, **kwargs)

    return fused
