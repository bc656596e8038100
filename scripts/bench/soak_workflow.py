"""The rollout workflow of `scripts/soak.py`: some prompts always go wrong.

What happens to a prompt follows from its text alone, so that runs can be compared. In
the reference run no result is late or damaged: prompts whose results would be damaged
are left out by the workflow itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
from areal.api import InferenceEngine
from areal.workflow.rlvr import RLVRWorkflow

REFERENCE_VARIABLE = "AREAL_DTA_SOAK_REFERENCE"
DAMAGED, FAILS, LATE = 0.03, 0.02, 0.10  # shares of the prompts
MAX_LATE_SECONDS = 3.0

Result = dict[str, torch.Tensor]


def _nan(result: Result) -> None:
    result["logprobs"][0, -1] = float("nan")


def _other_shape(result: Result) -> None:
    result["loss_mask"] = result["loss_mask"][:, :-1]


def _unknown_token(result: Result) -> None:
    result["input_ids"][0, -1] = 1 << 30


def _future(result: Result) -> None:
    result["versions"][0, -1] = 1 << 20


def _no_loss(result: Result) -> None:
    result["loss_mask"].zero_()


def _infinite_reward(result: Result) -> None:
    result["rewards"][0] = float("inf")


DAMAGES: tuple[Callable[[Result], None], ...] = (
    *(_nan, _other_shape, _unknown_token, _future, _no_loss, _infinite_reward),
)


def fate(prompt: str) -> tuple[str, float]:
    """Return what happens to a prompt's results, and a number in [0, 1)."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=16).digest()
    draw, detail = (int.from_bytes(digest[i : i + 8]) / 2.0**64 for i in (0, 8))
    for kind, share in (("damaged", DAMAGED), ("fails", FAILS), ("late", LATE)):
        if draw < share:
            return kind, detail
        draw -= share
    return "good", detail


class SoakWorkflow(RLVRWorkflow):
    """AReaL's workflow of one question and one answer, of random length."""

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> Result | None:
        kind, detail = fate(str(data["messages"]))
        is_reference = REFERENCE_VARIABLE in os.environ
        if kind == "fails":
            raise RuntimeError("injected by the soak test")
        if kind == "damaged" and is_reference:
            return None
        self.gconfig = self.gconfig.new(max_new_tokens=8 + int(56 * detail))
        result: Result = await super().arun_episode(engine, data)
        if kind == "late" and not is_reference:
            await asyncio.sleep(detail * MAX_LATE_SECONDS)
        if kind == "damaged":
            DAMAGES[int(detail * len(DAMAGES))](result)
        return result
