"""A world of one rank in the test process, and a tiny model on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from areal.utils import stats_tracker

from tests.engine.builders import save_tiny_critic, save_tiny_model

_RANK_ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One gloo rank, met through a file: no port is opened."""
    if torch.cuda.is_available():
        pytest.skip("AReaL would take the GPU: run these with CUDA_VISIBLE_DEVICES=")
    before = {name: os.environ.get(name) for name in _RANK_ENV}
    os.environ.update(_RANK_ENV)
    store = tmp_path_factory.mktemp("world") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def clean_statistics() -> Iterator[None]:
    """AReaL's statistics are global: start without any, and leave none."""
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_critic(tmp_path_factory.mktemp("critic"))
