"""Placeholder rows for a rank that received none, for tree and dense engines.

AReaL's algorithms log, split and weigh their rows before they train on them, and its
losses record statistics whose keys every rank must export. A rank without rows runs
them on placeholder rows: shaped as its peers' rows, zero in every key but the attention
mask, so without loss tokens. They have no weight and no statistic counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from areal.api.cli_args import MicroBatchSpec
from areal.utils.data import tensor_container_to

from areal_dta.engine.batch import BatchInput, RankBatch, load_batch
from areal_dta.engine.fsdp_gather_step import PeerFailure
from areal_dta.engine.statistics import LossStatistics

Template = dict[str, Any]
"""Key -> (dimensions after the padded width or the row, whether there is a padded
width, dtype) of a tensor, or a plain value."""


def template_of(rows: dict[str, Any]) -> Template | None:
    """Return what the rows look like, or None if there is none."""
    mask = rows.get("attention_mask")
    if mask is None or not len(mask):
        return None
    num_rows, width = mask.shape
    template: Template = {}
    for key, value in rows.items():
        if torch.is_tensor(value) and value.ndim and len(value) == num_rows:
            is_padded = value.ndim > 1 and value.shape[1] == width
            tail = tuple(value.shape[1 + is_padded :])
            template[key] = (tail, is_padded, value.dtype)
        elif isinstance(value, bool | int | float | str):
            template[key] = value
    return template


def placeholder_rows(
    template: Template, num_rows: int, width: int = 1
) -> dict[str, Any]:
    """Build rows of ``width`` tokens each: zero in every key but attention_mask."""
    rows: dict[str, Any] = {}
    for key, spec in template.items():
        if isinstance(spec, tuple):
            tail, is_padded, dtype = spec
            shape = (num_rows, width, *tail) if is_padded else (num_rows, *tail)
            rows[key] = torch.zeros(shape, dtype=dtype)
        else:
            rows[key] = spec
    rows["attention_mask"] = torch.ones((num_rows, width), dtype=torch.bool)
    return rows


def call_with_some_rows(
    engine: Any,
    call: Callable[[list[dict[str, Any]]], Any],
    items: list[dict[str, Any]],
    num_rows: int = 1,
) -> None:
    """Run one of AReaL's updates or evaluations, on placeholder rows if need be.

    Collective. While it runs on placeholders ``engine.has_placeholders`` is true.

    Args:
        call: the method; takes a list of items (padded tensors [rows, width, ...]).
        num_rows: number of placeholder rows: what ``call`` cannot do without.
    """
    # what the rows of the peers look like
    peers: list[Template | None] = [None] * dist.get_world_size(engine.cpu_group)
    own = template_of(items[0]) if items else None
    dist.all_gather_object(peers, own, group=engine.cpu_group)
    template = next((peer for peer in peers if peer), None)
    if items or template is None:
        call(items)
        return
    # two tokens: AReaL's critic squeezes a width of one away
    rows = placeholder_rows(template, num_rows, width=2)
    engine.has_placeholders = True
    try:
        with LossStatistics().silent_call():
            call([tensor_container_to(rows, engine.device)])
    finally:
        engine.has_placeholders = False


def load_together(
    input_: BatchInput, mb_spec: MicroBatchSpec, group: dist.ProcessGroup
) -> tuple[RankBatch, RankBatch | None]:
    """Run `load_batch` on every rank. Collective over ``group``.

    Returns:
        The batch; and on a rank without rows a placeholder of one row of one token
        (with granularity 2, two rows), on which a loss can be called for its
        statistics' keys.

    Raises:
        ValueError: as `load_batch`.
        PeerFailure: another rank could not load its rows.
    """
    # load, and tell the peers whether that worked
    error = None
    batch = RankBatch({}, [], [], None)
    try:
        batch = load_batch(input_, mb_spec)
    except Exception as e:  # raised below, when the peers know
        error = e
    peers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(peers, (error is None, template_of(batch.rows)), group=group)
    if error is not None:
        raise error
    failed = [rank for rank, (is_good, _) in enumerate(peers) if not is_good]
    if failed:
        raise PeerFailure(f"ranks {failed} could not load their rows; see their logs")
    # rows to call a loss on, if this rank has none and a peer has
    template = next((rows for _, rows in peers if rows), None)
    if batch.num_rows or template is None:
        return batch, None
    num_rows = mb_spec.granularity  # a loss of pairs needs two
    rows = placeholder_rows(template, num_rows)
    return batch, RankBatch(rows, [1] * num_rows, [list(range(num_rows))], None)
