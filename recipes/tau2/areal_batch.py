"""Sequences as a batch of AReaL's: one dict of padded tensors a prompt.

    input_ids, attention_mask, loss_mask, logprobs, versions   [B, T]
    rewards, begin_of_trajectory                               [B]

B are the sequences of all episodes of one task, T the longest of them. So a recorded
episode can be fed to whatever takes AReaL's rollouts: engines, collectors, dispatch.
No model sampled the tokens, so the logprobs are 0, and the versions 0 where a token is
trained and -1 elsewhere.

The file is in the safetensors format: names such as ``3.input_ids``, nothing pickled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.tau2.archive import SequenceBatch

KEYS = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "logprobs",
    "versions",
    "rewards",
    "begin_of_trajectory",
)
_FORMAT = {"format": "areal_dta tau2 batch"}


def areal_batch(batch: SequenceBatch) -> list[dict[str, Tensor]]:
    """One item a task of a domain, in the order in which they first occur."""
    prompts: dict[tuple[str, str], list[int]] = {}
    for index in range(batch.num_sequences):
        key = (str(batch.domain[index]), str(batch.task_id[index]))
        prompts.setdefault(key, []).append(index)
    return [_item(batch, indices) for indices in prompts.values()]


def _item(batch: SequenceBatch, indices: list[int]) -> dict[str, Tensor]:
    length = max(len(batch.sequence(i)) for i in indices)
    shape = (len(indices), length)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask = torch.zeros(shape, dtype=torch.int64)
    for row, index in enumerate(indices):
        tokens = batch.sequence(index)
        input_ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        attention_mask[row, : len(tokens)] = True
        mask = batch.mask(index).astype(np.int64)
        loss_mask[row, : len(tokens)] = torch.from_numpy(mask)
    episodes = batch.episode[indices]
    starts = np.concatenate([[True], episodes[1:] != episodes[:-1]])
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "logprobs": torch.zeros(shape),
        "versions": torch.where(loss_mask.bool(), 0, -1),
        "rewards": torch.from_numpy(batch.reward[indices]).float(),
        "begin_of_trajectory": torch.from_numpy(starts.astype(np.int64)),
    }


def save_areal_batch(items: list[dict[str, Tensor]], path: str | Path) -> None:
    """Write the file."""
    named = {f"{i}.{key}": item[key] for i, item in enumerate(items) for key in KEYS}
    save_file(named, path, _FORMAT)


def load_areal_batch(path: str | Path) -> list[dict[str, Tensor]]:
    """Read a file that `save_areal_batch` wrote.

    Raises:
        ValueError: it is not there, or is none.
    """
    try:
        named = load_file(path)
        num_items = len(named) // len(KEYS)
        return [{key: named[f"{i}.{key}"] for key in KEYS} for i in range(num_items)]
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(
            f"{path} holds no batch ({error}); write a file with "
            "python -m recipes.tau2.replay --out NAME.safetensors"
        ) from error
