"""The rows that the two-rank tests train on, together and on one rank."""

from __future__ import annotations

import torch

from tests.engine.builders import grpo_batch, rows_of

NUM_ROWS = 9


def union() -> dict:
    return grpo_batch(num_prompts=3, num_samples=3, seed=7)


def trajectories() -> list[dict]:
    """The union as it comes from the rollout: one item per prompt."""
    batch = union()
    for key in ("advantages", "prox_logp"):
        del batch[key]
    batch["loss_mask"] = batch["loss_mask"].roll(1, -1)
    batch["rewards"] = torch.arange(NUM_ROWS, dtype=torch.float32) % 4 - 1
    items = []
    for i in range(0, NUM_ROWS, 3):
        item = rows_of(batch, list(range(i, i + 3)))
        width = int(item["attention_mask"].sum(-1).max())
        items.append({k: v[:, :width] if v.ndim > 1 else v for k, v in item.items()})
    return items


def lm_items() -> list[dict]:
    """Return the union with one row per item, as a data set of conversations."""
    return _single_rows(("input_ids", "attention_mask", "loss_mask"))


def pair_items(with_loss_mask: bool = True) -> list[dict]:
    """Pairs: each row of the union and the next of its prompt, chosen first."""
    keys = ["input_ids", "attention_mask"] + ["loss_mask"] * with_loss_mask
    rows = _single_rows(tuple(keys))
    return [rows[i] for i in (0, 1, 2, 0, 3, 4, 7, 6)]


def _single_rows(keys: tuple[str, ...]) -> list[dict]:
    items = []
    for item in trajectories():
        for row in range(len(item["input_ids"])):
            length = int(item["attention_mask"][row].sum())
            items.append({k: item[k][[row], :length].clone() for k in keys})
    return items
