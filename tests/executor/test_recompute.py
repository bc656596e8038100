"""MLPs and norms that run again in the backward: the same gradients, fewer bytes."""

import numpy as np
import pytest
import torch

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.executor.memory.budget import predict_memory
from areal_dta.executor.memory.model_bytes import measure_graph_bytes
from areal_dta.executor.memory.recompute import PartRecompute
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.executor.test_memory import counted
from tests.executor.test_parity import SPECIAL, make_loss
from tests.models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    _NoCasts,
    gradients,
    relative_error,
    tiny_model,
)

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
}


def trained(model, batch, config: ExecutorConfig):
    executor = TreeExecutor(model, config)
    loss = executor.forward_backward(PrefixTree.from_sequences(batch), make_loss(batch))
    return loss, gradients(model), executor.last_schedule


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("budgets", [(5, 0), (7, 24), (64, None)], ids=str)
@pytest.mark.parametrize("recompute", ["mlp", "auto"])
def test_gradients_are_those_of_one_sequence_at_a_time(name, budgets, recompute):
    model = tiny_model(name, torch.float64)
    batch = random_batch(np.random.default_rng(3), 10, 30, VOCAB_SIZE)
    want_loss = oracle.forward_backward(model, batch, make_loss(batch))
    want = gradients(model)
    config = ExecutorConfig(*budgets, recompute=recompute)
    with _NoCasts():  # also where modules run again, outside of the model's forward
        loss, got, schedule = trained(model, batch, config)
    assert loss == pytest.approx(want_loss, rel=1e-10)
    assert relative_error(got, want) <= 1e-10
    parts = [step.keeps_part for step in schedule.steps if step.with_grad]
    assert all(parts) if recompute == "mlp" else any(parts) == (budgets == (7, 24))


@pytest.mark.parametrize("name", [*ARCHITECTURES, *SPECIAL])
def test_the_same_bits_as_with_whole_graphs(name):
    special = SPECIAL.get(name, {})
    eager = {"attn_implementation": "eager"} if special else {}
    model = tiny_model(name, torch.float32, **special, **eager)
    batch = random_batch(np.random.default_rng(4), 8, 24, VOCAB_SIZE)
    whole, part = (
        trained(model, batch, ExecutorConfig(12, 30, recompute=choice))
        for choice in ("none", "mlp")
    )
    assert whole[0] == part[0] and torch.equal(whole[1], part[1])
    assert all(step.keeps_part for step in part[2].steps if step.with_grad)
    num_layers = model.config.num_hidden_layers
    assert len(PartRecompute(model).modules) >= 3 * num_layers  # MLP and two norms
    assert not any("forward" in vars(m) for m in PartRecompute(model).modules)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fewer_bytes_are_saved_as_predicted(name, dtype):
    model = tiny_model(name, dtype, **WIDE)
    memory = predict_memory(model, ExecutorConfig())
    whole = measure_graph_bytes(model)
    part = measure_graph_bytes(model, ExecutorConfig(recompute="mlp"))
    assert memory.graph_bytes == pytest.approx(whole, rel=0.06)
    assert memory.part_graph_bytes == pytest.approx(part, rel=0.15)
    assert part < 0.55 * whole


def test_the_peak_falls():
    model = tiny_model("qwen3", **WIDE)
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, VOCAB_SIZE, 200).tolist()
    tree = PrefixTree.from_sequences([[*trunk, i, *trunk[:150]] for i in range(4)])
    whole, part = (
        counted(model, TreeExecutor(model, ExecutorConfig(512, recompute=r)), tree)
        for r in ("none", "mlp")
    )
    assert part.peak < 0.7 * whole.peak and part.live == 0
