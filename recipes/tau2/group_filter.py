"""Drops prompts whose group-normalized rewards teach nothing."""

from __future__ import annotations

import threading
from typing import Any

MAX_DROPPED_IN_A_ROW = 64

_lock = threading.Lock()
_num_dropped = 0


def has_different_rewards(trajectory: dict[str, Any]) -> bool:
    """Return whether some, but not all, episodes of a prompt succeeded.

    If all rewards are equal, the advantages are 0, and the sequences only cost time.
    tau2's rewards are 0 or 1, but a turn discount lowers them from call to call, so
    every reward above 0 is a success.

    With an agent that always fails, or never does, the trainer would wait for ever. So
    one prompt is let through after `MAX_DROPPED_IN_A_ROW` dropped ones.

    Args:
        trajectory: AReaL's, of one prompt, with `rewards` ``[num_sequences]``.
    """
    global _num_dropped
    succeeded = trajectory["rewards"] > 0
    informative = bool(succeeded.any() and not succeeded.all())
    with _lock:
        if informative or _num_dropped >= MAX_DROPPED_IN_A_ROW:
            if not informative:
                _warn(bool(succeeded.any()))
            _num_dropped = 0
            return True
        _num_dropped += 1
        return False


def _warn(succeeds: bool) -> None:
    from areal_dta.areal_fixes.loggers import task_logger

    task_logger("tau2").warning(
        "%d prompts in a row had equal rewards; the agent always %s. Training goes on "
        "with one of them, which teaches nothing: choose other tasks or another model.",
        MAX_DROPPED_IN_A_ROW,
        "succeeds" if succeeds else "fails",
    )
