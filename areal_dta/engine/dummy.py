"""What a rank without rows uses in their place where an algorithm needs some.

A loss or a whole update can be run on dummy rows for the collectives and statistics
keys that it takes part in; they weigh nothing and are not counted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Template = dict[str, Any]
"""Key -> (shape of a row cut to one token, dtype) of a tensor, or a plain value."""


def template_of(rows: dict[str, Any]) -> Template | None:
    """What the rows look like; None of none."""
    mask = rows.get("attention_mask")
    if mask is None or not len(mask):
        return None
    num_rows, width = mask.shape
    template: Template = {}
    for key, value in rows.items():
        if torch.is_tensor(value) and value.ndim and len(value) == num_rows:
            tail = list(value.shape[1:])
            if tail and tail[0] == width:
                tail[0] = 1
            template[key] = (tuple(tail), value.dtype)
        elif isinstance(value, bool | int | float | str):
            template[key] = value
    return template


def zero_rows(template: Template, num_rows: int) -> dict[str, Any]:
    """Rows of one token each, zero in every key, attention_mask apart."""
    rows: dict[str, Any] = {}
    for key, spec in template.items():
        if isinstance(spec, tuple):
            tail, dtype = spec
            rows[key] = torch.zeros((num_rows, *tail), dtype=dtype)
        else:
            rows[key] = spec
    rows["attention_mask"] = torch.ones((num_rows, 1), dtype=torch.bool)
    return rows


def gather_template(rows: dict[str, Any], group: dist.ProcessGroup) -> Template | None:
    """The template of the first rank that has rows. Collective; None if none has."""
    peers: list[Template | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(peers, template_of(rows), group=group)
    return next((template for template in peers if template), None)
