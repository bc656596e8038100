"""What a rank without rows computes on."""

from types import SimpleNamespace

import pytest
import torch
from areal.api.cli_args import MicroBatchSpec

from areal_dta.engine import placeholder_rows as module
from areal_dta.engine.batch import load_batch
from areal_dta.engine.placeholder_rows import (
    call_with_some_rows,
    placeholder_rows,
    template_of,
)
from tests.engine.builders import grpo_batch


@pytest.mark.parametrize("width", [1, 2])
def test_placeholder_rows_have_their_peers_keys(width):
    batch = load_batch(
        grpo_batch()
        | {"weight": torch.ones(6), "scale": 0.5, "features": torch.ones(6, 3)},
        MicroBatchSpec(),
    )
    rows = placeholder_rows(template_of(batch.rows), num_rows=2, width=width)
    assert rows.keys() == batch.rows.keys()
    assert rows["attention_mask"].all()
    assert rows["attention_mask"].shape == rows["input_ids"].shape == (2, width)
    assert rows["weight"].shape == (2,) and rows["features"].shape == (2, 3)
    for key, value in rows.items():
        if torch.is_tensor(value):
            assert len(value) == 2 and value.dtype == batch.rows[key].dtype
    assert not rows["advantages"].any() and rows["scale"] == 0.5
    assert template_of({}) is None


def peers_have(monkeypatch, rows):
    def all_gather_object(everyone, own, group):
        everyone[:] = [own, template_of(rows)]

    monkeypatch.setattr(module.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(module.dist, "all_gather_object", all_gather_object)


def run(items):
    engine = SimpleNamespace(cpu_group=None, device="cpu", has_placeholders=False)
    calls = []

    def update(given):
        calls.append((given, engine.has_placeholders))

    call_with_some_rows(engine, update, items, num_rows=3)
    assert not engine.has_placeholders
    return calls


def test_a_rank_without_rows_runs_on_placeholders(monkeypatch):
    peers_have(monkeypatch, grpo_batch())
    [([rows], has_placeholders)] = run([])
    assert has_placeholders and rows["input_ids"].shape == (3, 2)
    assert not rows["loss_mask"].any()


def test_a_rank_with_rows_keeps_them_and_nobody_having_any_is_no_reason(monkeypatch):
    items = [grpo_batch()]
    peers_have(monkeypatch, {})
    assert run(items) == [(items, False)]
    assert run([]) == [([], False)]
