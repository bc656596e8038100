"""Pages on a run's batches: written when due, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from areal_dta.embedded import tiny_model_path
from areal_dta.report.batch_sharing import BatchMeter
from areal_dta.trainers.batch_pages import BatchPages


def batch() -> list[dict[str, Any]]:
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    loss = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]])
    return [{"input_ids": ids, "attention_mask": mask, "loss_mask": loss}]


def pages(folder: Path, warnings: list[str], **options: Any) -> BatchPages:
    path = tiny_model_path()
    arguments: dict[str, Any] = {
        "every": 2,
        "folder": folder,
        "num_steps_done": 0,
        "meter": BatchMeter(None, 512, None),
        "num_ranks": 2,
        "tokenizer": path,
        "model": path,
        "dtype": "float32",
        "warn": warnings.append,
    }
    return BatchPages(**{**arguments, **options})


def test_every_other_batch_gets_a_page(tmp_path: Path) -> None:
    warnings: list[str] = []
    writer = pages(tmp_path, warnings)
    for _ in range(3):
        writer.see(batch())
        writer.wait()
    names = sorted(path.name for path in (tmp_path / "inspect").iterdir())
    assert names == ["step-1.html", "step-3.html"]
    assert "Step 3" in (tmp_path / "inspect" / "step-3.html").read_text()
    assert warnings == []


def test_continued_run_counts_on(tmp_path: Path) -> None:
    writer = pages(tmp_path, [], num_steps_done=2)
    writer.see(batch())
    writer.wait()
    assert [p.name for p in (tmp_path / "inspect").iterdir()] == ["step-3.html"]


def test_trouble_is_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / "inspect").write_text("in the way")
    writer = pages(tmp_path, warnings, every=1)
    for _ in range(2):
        writer.see(batch())
        writer.wait()
    writer.see([{"nonsense": 1}])
    assert len(warnings) == 1
    assert "report.inspect_every" in warnings[0]
