"""One tiny model and one server for the tests that do not harm it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.rollout_server.builders import (
    RunningServer,
    model_for_generation,
    running_server,
)


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return model_for_generation()


@pytest.fixture(scope="session")
def model_path(
    model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def server(model_path: Path) -> Iterator[RunningServer]:
    with running_server(model_path, random_seed=7) as running:
        yield running
