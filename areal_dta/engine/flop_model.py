"""FLOPs of a model whose outputs are logprobs or values. Light: no AReaL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from areal_dta.schedule import FlopModel


def flop_model(hf_config: Any, of_values: bool) -> FlopModel:
    """
    Args:
        hf_config: the Hugging Face configuration of a decoder.
        of_values: a critic or a reward model: one number a position, no vocabulary.

    Raises:
        ValueError: an architecture that cannot be counted.
    """
    model = FlopModel.from_config(hf_config)
    if of_values:
        model = replace(model, per_logit_row=2.0 * hf_config.hidden_size)
    return model
