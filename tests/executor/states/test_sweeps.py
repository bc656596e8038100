"""Every kind of layer with a state under every budget: adapters, frozen layers, values.

Slow. What is quick of it, and full training under the same budgets, is in
test_parity.py; two ranks and both ways to gather are in tests/engine/test_hybrid_ranks.
"""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForTokenClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.executor.states.test_parity import BUDGETS
from tests.executor.test_parity import compare
from tests.models import (
    HYBRIDS,
    VOCAB_SIZE,
    gradients,
    keep_fp64,
    relative_error,
    tiny_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CRITICS = [
    name
    for name in HYBRIDS
    if name.split("-")[0] in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
]
PEFT_REFUSES_OTHERS = {
    "mamba2": ["in_proj"],
    "falcon_h1": ["in_proj", "q_proj", "v_proj", "down_proj"],
}
"""peft takes no adapters of `out_proj` in these types."""
TOLERANCE = 1e-10


def batch_of(seed):
    return random_batch(np.random.default_rng(seed), 8, 24, VOCAB_SIZE)


def layer_parameters(model):
    """Return the names of the parameters of each layer, by its index."""
    layers = {}
    for name, _ in model.named_parameters():
        if ".layers." in name:
            index = int(name.split(".layers.")[1].split(".")[0])
            layers.setdefault(index, []).append(name)
    return layers


@pytest.mark.parametrize("name", HYBRIDS)
def test_one_layer_that_is_trained(name):
    model = tiny_model(name, torch.float64)
    layers = layer_parameters(model)
    assert len(layers) == model.config.num_hidden_layers
    for index, names in layers.items():
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter_name in names)
        for budgets in BUDGETS:
            compare(model, batch_of(index), ExecutorConfig(*budgets))


@pytest.mark.parametrize("name", HYBRIDS)
def test_all_but_the_first_layers_and_embeddings(name):
    model = tiny_model(name, torch.float64)
    frozen = {*layer_parameters(model)[0], *layer_parameters(model)[1]}
    for parameter_name, parameter in model.named_parameters():
        is_trained = parameter_name not in frozen and "embed" not in parameter_name
        parameter.requires_grad_(is_trained)
    for seed, budgets in enumerate(BUDGETS):
        compare(model, batch_of(seed), ExecutorConfig(*budgets))


@pytest.mark.parametrize("name", HYBRIDS)
def test_adapters(name):
    torch.manual_seed(1)
    base = tiny_model(name, torch.float64)
    base.enable_input_require_grads()  # as AReaL does
    targets = PEFT_REFUSES_OTHERS.get(name, "all-linear")
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=targets, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    for seed, budgets in enumerate(BUDGETS):
        compare(model, batch_of(seed), ExecutorConfig(*budgets))


def test_some_kinds_give_values():
    assert {"qwen3_next"} <= set(CRITICS)


@pytest.mark.parametrize("name", CRITICS)
def test_values(name):
    config = tiny_model(name).config
    config.num_labels, config.classifier_dropout = 1, 0.0
    options = {"experts_implementation": "eager"} if "moe" in name else {}
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model = model.double().train()
    keep_fp64(model)
    for seed, budgets in enumerate(BUDGETS):
        batch, want = batch_of(seed), 0.0
        for i, sequence in enumerate(batch):
            values = oracle.value_output(model, sequence).values
            loss = (values * torch.arange(1.0, len(values) + 1)).sum() * (i + 1)
            loss.backward()
            want += float(loss.detach())
        expected = gradients(model)
        executor = TreeExecutor(model, ExecutorConfig(*budgets), outputs="values")
        tree = PrefixTree.from_sequences(batch)
        got = executor.forward_backward(
            tree,
            lambda i, values: (
                (values * torch.arange(1.0, len(values) + 1)).sum() * (i + 1)
            ),
        )
        assert abs(got - want) <= TOLERANCE * abs(want)
        assert relative_error(gradients(model), expected) <= TOLERANCE
        for out, sequence in zip(executor.forward(tree), batch, strict=True):
            alone = oracle.value_output(model, sequence).values
            assert relative_error(out.values, alone) <= TOLERANCE
