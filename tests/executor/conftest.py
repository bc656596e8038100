"""Models in fp64 that several test modules share."""

import pytest
import torch
from transformers import AutoModelForTokenClassification, PreTrainedModel

from tests.models import keep_fp64, tiny_model


@pytest.fixture(scope="session")
def value_model() -> PreTrainedModel:
    """A critic: one label per token."""
    config = tiny_model("qwen3").config
    config.num_labels, config.classifier_dropout = 1, 0.0
    torch.manual_seed(3)
    model = AutoModelForTokenClassification.from_config(config).double().train()
    keep_fp64(model)
    return model
