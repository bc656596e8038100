"""Engines that are continued: schedule, random numbers, failures that are answered."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from areal.api import SaveLoadMeta
from areal.engine import fsdp_engine
from areal.engine.fsdp_engine import FSDPEngine
from areal.utils import seeding
from torch.distributed.checkpoint.api import CheckpointException

from areal_dta.areal_fixes.slot_files import disk_trouble
from areal_dta.areal_fixes.training_engines import RecoverableEngine
from areal_dta.engine.dense_engines import DenseEngine
from areal_dta.engine.dta_engine import DTAEngine


def engine(cls: type[FSDPEngine] = RecoverableEngine) -> Any:
    made: Any = cls.__new__(cls)
    made.model, made.optimizer, made.is_offload = "model", None, False
    return made


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_all_engines_are() -> None:
    assert issubclass(DTAEngine, RecoverableEngine)
    assert issubclass(DenseEngine, RecoverableEngine)


def test_draws_follow_from_seed_rank_and_version() -> None:
    def drawn(role: str, version: int, seed: int = 1) -> list[float]:
        seeding.set_random_seed(seed, role)
        draws()  # whatever came before
        engine().set_version(version)
        return draws()

    assert drawn("actor0", 3) == drawn("actor0", 3)
    others = [drawn("actor0", 4), drawn("actor1", 3), drawn("actor0", 3, seed=2)]
    assert drawn("actor0", 3) not in others


def test_an_engine_without_a_worker_has_no_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seeding, "_SEED", None)
    made = engine()
    made.set_version(5)
    assert made.get_version() == 5


def test_the_schedule_is_fast_forwarded() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    made = engine()
    made.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 8)
    made.advance_lr_scheduler(5)
    assert optimizer.param_groups[0]["lr"] == 5 / 8


@pytest.mark.parametrize("method", ["save", "load"])
@pytest.mark.parametrize(
    "failure, expected, message",
    [
        (OSError(errno.ENOSPC, "No space left on device"), OSError, "No space left"),
        # how PyTorch 2.10 reports a write that the system refused
        (
            RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos"),
            OSError,
            "Input/output error",
        ),
        (KeyError("weight"), RuntimeError, "rank 1: KeyError: 'weight'"),
    ],
    ids=["disk", "writer", "other"],
)
def test_a_failure_is_an_exception(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    failure: Exception,
    expected: type[Exception],
    message: str,
) -> None:
    """A worker's server answers with exceptions only, so others are converted."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise CheckpointException("failed", {1: (failure, None), 2: (failure, None)})

    monkeypatch.setattr(fsdp_engine.dcp, method, fail)
    meta = SaveLoadMeta(str(tmp_path), "dcp", False, None, None, None)
    with pytest.raises(expected, match=message) as raised:
        getattr(engine(), method)(meta)
    assert (disk_trouble(raised.value) is None) is (expected is RuntimeError)
    assert disk_trouble(RuntimeError(str(raised.value))) == disk_trouble(raised.value)
