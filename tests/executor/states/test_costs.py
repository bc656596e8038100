"""What states cost, in bytes and in FLOPs, is known from a model's sizes."""

import pytest
import torch

from areal_dta.executor import ExecutorConfig, TreeExecutor
from areal_dta.executor.memory.budget import choose_budgets, predict_memory
from areal_dta.executor.states.trunk_states import TrunkStates
from areal_dta.schedule.flops import FlopModel
from areal_dta.tree import PrefixTree
from tests.models import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_bytes_of_an_attach_point(name, dtype, monkeypatch):
    model = tiny_model(name, dtype)
    own, found = TrunkStates.__init__, []

    def init(self, leaving, segments, children):
        found.append(sum(x[0].nbytes for x in leaving.values()))
        own(self, leaving, segments, children)

    monkeypatch.setattr(TrunkStates, "__init__", init)
    tree = PrefixTree.from_sequences([[1, 2, 3, 4, 5], [1, 2, 6]])
    TreeExecutor(model, ExecutorConfig(2)).forward(tree)
    memory = predict_memory(model, ExecutorConfig())
    assert set(found) == {memory.state_bytes} and memory.state_bytes > 0


def test_states_take_room_from_the_budgets():
    model = tiny_model("qwen3_5_text")
    memory = predict_memory(model, ExecutorConfig())
    assert memory.states(3) == 3 * (memory.state_bytes + memory.state_grad_bytes)
    plain = predict_memory(tiny_model("qwen3"), ExecutorConfig())
    assert plain.states(3) == 0
    usable = 40 * memory.states(1)
    with_states = choose_budgets(memory, usable, longest_path=1024)
    assert with_states.predicted_bytes > memory.states(1024 / 512 + 2)


def test_pairs_are_those_of_layers_that_attend():
    config = tiny_model("qwen3_5_text").config
    hybrid = FlopModel.from_config(config)
    config.layer_types = ["full_attention"] * 4
    full = FlopModel.from_config(config)
    assert hybrid.per_pair * 4 == full.per_pair
    assert hybrid.per_output == full.per_output
