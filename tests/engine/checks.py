"""What parity tests and the two-rank workers run on an engine alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from areal.api.cli_args import RejectionSamplingConfig
from areal.trainer.ppo.actor import grpo_loss_fn

from tests.engine.builders import gradients, parameters, relative_error

FP32 = 1e-5
"""Relative; the two engines differ by 6e-7 here, in the order of their sums."""


def grpo_loss(**overrides: Any) -> Callable[..., torch.Tensor]:
    """AReaL's own loss: decoupled GRPO with clipping and rejection of stale tokens."""
    values: dict[str, Any] = {
        "eps_clip": 0.2,
        "eps_clip_higher": 0.3,
        "c_clip": 3.0,
        "rejection_sampling": RejectionSamplingConfig(upper=1.3, lower=0.8),
        "current_version": 2,
        "use_decoupled_loss": True,
    }
    return functools.partial(grpo_loss_fn, **{**values, **overrides})


def loss_tokens(mb_input: dict[str, Any]) -> torch.Tensor:
    """The weight that AReaL's ``ppo_update`` uses."""
    return mb_input["loss_mask"].count_nonzero()


def entropy_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, mb_input: dict, **_: Any
) -> torch.Tensor:
    """A loss with gradients through entropies, and weights that are not 0 or 1."""
    weight = mb_input["loss_mask"] * mb_input["advantages"].abs()
    value = weight * (0.3 * entropy - logprobs)
    return value.sum() / token_weight(mb_input)


def token_weight(mb_input: dict[str, Any]) -> torch.Tensor:
    weight = mb_input["loss_mask"] * mb_input["advantages"].abs()
    return weight.double().sum()


def train_once(
    engine: Any,
    batch: Any,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    weight_fn: Callable[..., torch.Tensor] = loss_tokens,
) -> dict[str, Any]:
    """One update, and everything that parity is about."""
    result = engine.train_batch(batch, loss_fn or grpo_loss(), weight_fn)
    return {
        "result": result,
        "gradients": gradients(engine),
        "parameters": parameters(engine),
        "stats": engine.export_stats(),
    }


def labelled(outputs: torch.Tensor, batch: dict) -> torch.Tensor:
    """Logprobs at the positions that have a next token, the others 0."""
    mask = batch["attention_mask"].roll(-1, -1).clone()
    mask[:, -1] = False
    width = outputs.shape[1]
    return outputs * mask[:, :width]


def assert_same_update(actual, expected):
    assert relative_error(actual["gradients"], expected["gradients"]) <= FP32
    assert relative_error(actual["parameters"], expected["parameters"]) <= FP32
    for key in ("update_successful", "lr"):
        assert actual["result"][key] == expected["result"][key]
    norms = actual["result"]["grad_norm"], expected["result"]["grad_norm"]
    assert norms[0] == pytest.approx(norms[1], rel=FP32)


def assert_same_statistics(actual, expected):
    """Those of the vocabulary's extreme logits apart, which are absent."""
    ours, theirs = (
        {k: v for k, v in x["stats"].items() if "vocab_" not in k and "dta/" not in k}
        for x in (actual, expected)
    )
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
