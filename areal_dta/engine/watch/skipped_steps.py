"""Steps that are skipped because a loss or a gradient is not finite.

AReaL's engine leaves the weights as they are when the norm of the gradient is not
finite. So that a loss that is not finite does the same on every rank, it is put into
the gradient. The rows of such a step are written to a file that
``scripts/bench_executor.py --data FILE`` opens: ``tokens``, ``offsets`` [n + 1] and
``loss_mask`` (entry t says whether token t is trained), as recorded sequences have
them; and every other value of the batch, as ``token_<key>`` [tokens] or ``row_<key>``
[n]. Nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from areal_dta.engine.batch import Alignment, RankBatch

MAX_FILES: Final = 8
"""Files per rank and run; the first ones, since trouble begins there."""


def spread_to_gradient(model: torch.nn.Module, loss: float) -> None:
    """Make this rank's gradient not finite if its loss is not."""
    if math.isfinite(loss):
        return
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        grad = parameter.grad
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if local.numel():
            local.view(-1)[0] = math.nan
            return


def report_skipped_step(
    engine: Any,
    batch: RankBatch,
    alignment: Alignment | None,
    stats: Mapping[str, float],
) -> None:
    """Warn of a step whose update was skipped, and write its rows to a file."""
    if stats.get("update_successful", 1.0):
        return
    what = f"update skipped: the norm of its gradient is {stats['grad_norm']}"
    folder = getattr(getattr(engine.config, "dta", None), "skipped_dir", "")
    if not folder or not batch.num_rows:
        engine.logger.warning(what)
        return
    rank = engine.dp_rank
    existing = list(Path(folder).glob(f"*-rank{rank}*.npz"))
    if len(existing) >= MAX_FILES:
        engine.logger.warning(f"{what}; {MAX_FILES} batches are in {folder} already")
        return
    name = f"{type(engine).__name__}-version{engine.get_version()}-rank{rank}"
    path = Path(folder) / f"{name}-{len(existing)}.npz"
    try:
        save_rows(path, batch, alignment)
    except OSError as error:  # a full disk must not end the run
        engine.logger.warning(f"{what}; its batch was not written: {error}")
    else:
        engine.logger.warning(f"{what}; its batch is in {path}")


def save_rows(path: Path, batch: RankBatch, alignment: Alignment | None) -> None:
    """Write the rows, compressed.

    Args:
        alignment: of the batch's ``loss_mask``; None: no token of a row is told apart,
            and its last one counts as trained.
    """
    # B = rows, S = padded width
    lengths = np.array(batch.lengths)
    width = int(batch.rows["input_ids"].shape[1])
    is_token_BS = np.arange(width)[None, :] < lengths[:, None]
    tokens = {
        key: value.detach().float().numpy()
        if value.is_floating_point()
        else value.numpy()
        for key, value in batch.rows.items()
        if torch.is_tensor(value)
    }
    mask_BS = np.zeros((batch.num_rows, width), dtype=bool)
    if alignment is None or "loss_mask" not in tokens:
        mask_BS[np.arange(batch.num_rows), np.maximum(lengths - 1, 0)] = True
    elif alignment is Alignment.TOKEN:
        mask_BS = tokens["loss_mask"].astype(bool)
    else:
        mask_BS[:, 1:] = tokens["loss_mask"][:, :-1].astype(bool)
    kept = lengths > 0  # readers expect no empty sequences
    arrays: dict[str, NDArray[Any]] = {
        "tokens": tokens["input_ids"][is_token_BS].astype(np.int32),
        "loss_mask": mask_BS[is_token_BS],
        "offsets": np.concatenate([[0], np.cumsum(lengths[kept])]).astype(np.int64),
    }
    # what recorded sequences have besides (recipes/tau2/recorded/sequences.py)
    num_rows = int(kept.sum())
    numbers = np.arange(num_rows, dtype=np.int32)
    arrays |= {
        "domain": np.full(num_rows, "skipped step"),
        "task_id": numbers.astype(str),
        "trial": np.zeros(num_rows, np.int32),
        "episode": numbers,
        "call": np.zeros(num_rows, np.int32),
        "reward": np.zeros(num_rows, np.float32),
    }
    for key, value in tokens.items():
        if value.shape[:2] == (batch.num_rows, width) and value.ndim == 2:
            arrays[f"token_{key}"] = value[is_token_BS]
        elif value.shape[:1] == (batch.num_rows,):
            arrays[f"row_{key}"] = value[kept]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
