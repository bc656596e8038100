"""Token sequences with loss masks, and the `.npz` file that holds them.

Needs numpy only, so that benchmarks can read a file without tau2 or AReaL. The file
holds the fields of `SequenceBatch` by name, and nothing pickled.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBatch:
    """Sequences in flat arrays: sequence i is ``tokens[offsets[i]:offsets[i + 1]]``."""

    tokens: NDArray[np.int32]
    """``[total]``"""
    loss_mask: NDArray[np.bool_]
    """``[total]``; entry t says whether token t is trained, like AReaL's."""
    offsets: NDArray[np.int64]
    """``[num_sequences + 1]``, from 0 to total."""
    domain: NDArray[np.str_]
    """``[num_sequences]``, like all fields below."""
    task_id: NDArray[np.str_]
    trial: NDArray[np.int32]
    episode: NDArray[np.int32]
    """Line of the episode in the trajectory file, from 0."""
    call: NDArray[np.int32]
    """Index of the model call that the sequence ends with, in its episode."""
    reward: NDArray[np.float32]
    """Reward of the episode."""

    def __post_init__(self) -> None:
        num = self.num_sequences
        ok = (
            self.offsets.shape == (num + 1,)
            and self.offsets[0] == 0
            and bool((np.diff(self.offsets) > 0).all())
            and self.tokens.shape == self.loss_mask.shape == (self.offsets[-1],)
            and self.tokens.dtype == np.int32
            and self.loss_mask.dtype == np.bool_
        )
        names = ("task_id", "trial", "episode", "call", "reward")
        if not ok or any(getattr(self, name).shape != (num,) for name in names):
            shapes = {f.name: getattr(self, f.name).shape for f in fields(self)}
            raise ValueError(
                f"the arrays do not make up sequences: {shapes}; expected offsets that "
                "rise from 0 to the number of tokens (int32) and of mask entries "
                "(bool), and one entry per sequence in the others"
            )

    @property
    def num_sequences(self) -> int:
        return len(self.domain)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens per sequence, ``[num_sequences]``."""
        return np.diff(self.offsets)

    def sequence(self, index: int) -> NDArray[np.int32]:
        """Return the token ids of a sequence, ``[length]``, a view."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def mask(self, index: int) -> NDArray[np.bool_]:
        """Return the loss mask of a sequence, ``[length]``, a view."""
        return self.loss_mask[self.offsets[index] : self.offsets[index + 1]]


def save_sequences(batch: SequenceBatch, path: str | Path) -> None:
    """Write the file, compressed, at exactly `path`."""
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
    with open(path, "wb") as file:  # given a path, numpy would append .npz
        np.savez_compressed(file, **arrays)


def load_sequences(path: str | Path) -> SequenceBatch:
    """Read a file that `save_sequences` wrote.

    Raises:
        ValueError: the file is missing or invalid.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("not an .npz file" if Path(path).exists() else "no file")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {
                field.name: archive[field.name] for field in fields(SequenceBatch)
            }
        return SequenceBatch(**arrays)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} holds no sequences ({error}); "
            "write a file with python -m recipes.tau2.replay"
        ) from error
