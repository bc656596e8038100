"""LoRA: who trains adapters, who serves them, and the refusals of who does not.

*Training* (``actor.use_lora``). AReaL adds peft's adapters to the model before FSDP
wraps it. Tree engines and dense twins then train them as they train any model:
  * the executor calls the adapted modules (`executor.model_refusals.model_inputs`);
  * below the first adapter nothing has a graph, so keys and values there are left out
    of the backward pass (`executor.traversal`);
  * an adapted head keeps its own projection (`executor.outputs`); a frozen one costs no
    gradient (`executor.fused_logprobs`);
  * the passes over a sharded model gather and reduce what requires a gradient
    (`engine.fsdp_gather_step`, `engine.fsdp_gather_layer`).
Refused are peft's prompt and prefix tuning, which add virtual tokens to every call
(`executor.model_refusals`).

*Serving* (``rollout.use_lora``). SGLang serves adapters; the embedded server takes
whole checkpoints. It refuses adapters at start-up, in a request, and in a directory
that it is told to load; the functions below say so.

Tests: tests/executor/test_lora.py (gradients), tests/engine/test_lora.py (updates).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_dta.config.composed import ConfigError

ADAPTER_FILE = "adapter_config.json"


def check_served(config: Any) -> None:
    """Check, before anything starts, that the embedded server gets no adapters.

    Args:
        config: a `DTAGRPOConfig` with ``rollout.backend=local``.

    Raises:
        ConfigError: actor or rollout use LoRA.
    """
    if config.actor.use_lora or config.rollout.use_lora:
        raise ConfigError(
            "actor.use_lora=true, but rollout.backend=local takes whole checkpoints, "
            "not adapters; use rollout.backend=sglang:dN, or actor.use_lora=false"
        )


def check_request(with_lora: bool) -> None:
    """Check that a generation request asks for no adapter.

    Raises:
        ValueError: it does.
    """
    if with_lora:
        raise ValueError(
            "the local rollout server does not serve LoRA adapters; set "
            "rollout.use_lora=false or use rollout.backend=sglang."
        )


def adapter_problem(directory: Path) -> str | None:
    """Return why a directory cannot be loaded if it holds an adapter, else None."""
    if not (directory / ADAPTER_FILE).exists():
        return None
    return (
        f"{str(directory)!r} holds a LoRA adapter; the local rollout server takes full "
        "weights only. Set actor.use_lora=false or rollout.backend=sglang."
    )
