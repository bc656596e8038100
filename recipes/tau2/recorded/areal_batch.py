"""Converts sequences to an AReaL batch: one dict of padded tensors per prompt.

    input_ids, attention_mask, loss_mask, logprobs, versions   [B, T]
    rewards, begin_of_trajectory                               [B]

B counts the sequences of all episodes of one task, T is the longest length. So recorded
episodes can be fed to whatever takes AReaL's rollouts: engines, collectors, dispatch.
No model sampled the tokens, so all logprobs are 0, and versions are 0 where a token is
trained and -1 elsewhere.

The file is in the safetensors format, with names such as ``3.input_ids``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipes.tau2.recorded.sequences import SequenceBatch

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
    """Build one item per domain and task, in order of first occurrence."""
    prompts: dict[tuple[str, str], list[int]] = {}
    for index in range(batch.num_sequences):
        key = (str(batch.domain[index]), str(batch.task_id[index]))
        prompts.setdefault(key, []).append(index)
    return [_item(batch, indices) for indices in prompts.values()]


def _item(batch: SequenceBatch, indices: list[int]) -> dict[str, Tensor]:
    lengths = torch.from_numpy(batch.lengths[indices])
    input_ids = _padded([batch.sequence(i) for i in indices])
    loss_mask = _padded([batch.mask(i) for i in indices])
    attention_mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
    episodes = batch.episode[indices]
    starts = np.concatenate([[True], episodes[1:] != episodes[:-1]])
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "logprobs": torch.zeros(input_ids.shape),
        "versions": torch.where(loss_mask.bool(), 0, -1),
        "rewards": torch.from_numpy(batch.reward[indices]).float(),
        "begin_of_trajectory": torch.from_numpy(starts.astype(np.int64)),
    }


def _padded(arrays: list[np.ndarray]) -> Tensor:
    tensors = [torch.from_numpy(array.astype(np.int64)) for array in arrays]
    return pad_sequence(tensors, batch_first=True)


def save_areal_batch(items: list[dict[str, Tensor]], path: str | Path) -> None:
    """Write the file."""
    named = {f"{i}.{key}": item[key] for i, item in enumerate(items) for key in KEYS}
    save_file(named, path, _FORMAT)


def load_areal_batch(path: str | Path) -> list[dict[str, Tensor]]:
    """Read a file that `save_areal_batch` wrote.

    Raises:
        ValueError: the file is missing or invalid.
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
