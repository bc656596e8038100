"""Models with layers that carry a state equal one sequence at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForTokenClassification

from areal_dta.executor import (
    ExecutorConfig,
    TreeExecutor,
    UnsupportedModelError,
    oracle,
)
from areal_dta.executor.checks.self_check import check_on_tiny_tree
from areal_dta.executor.states.kinds import stateful_layers
from areal_dta.tree import PrefixTree
from tests.builders import batches, random_batch
from tests.executor.test_parity import SHAPES, compare, make_loss
from tests.models import (
    HYBRIDS,
    VOCAB_SIZE,
    gradients,
    keep_fp64,
    relative_error,
    tiny_model,
)

QUICK = ("qwen3_5_text", "lfm2", "mamba2")
BUDGETS = ((1, 0), (3, None), (7, 0), (16, 20), (32, 60), (512, None))


@pytest.fixture(scope="module", params=QUICK)
def fp64_model(request):
    return tiny_model(request.param, torch.float64)


def long_batch(seed):
    """Forks within and right after a convolution's tail, and runs of several chunks."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(VOCAB_SIZE, size=75).tolist()
    batch = [trunk, trunk[:40], trunk]
    for keep, size in ((1, 2), (41, 2), (64, 30), (75, 1), (75, 70)):
        branch = trunk[:keep] + rng.integers(VOCAB_SIZE, size=size).tolist()
        batch += [branch, branch + rng.integers(VOCAB_SIZE, size=3).tolist()]
    return batch


def small_batch(seed):
    return random_batch(np.random.default_rng(seed), 5, 12, VOCAB_SIZE)


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_kind(name):
    compare(tiny_model(name, torch.float64), small_batch(1), ExecutorConfig(5, 10))


def test_long_runs():
    model = tiny_model("qwen3_5_text", torch.float64)
    compare(model, long_batch(0), ExecutorConfig(64, 0, temperature=0.9))


@settings(max_examples=4, deadline=None)
@given(
    batch=batches(5, 10, VOCAB_SIZE // 10),
    block_tokens=st.integers(1, 40),
    retain_tokens=st.one_of(st.none(), st.integers(0, 40)),
)
def test_random_trees(fp64_model, batch, block_tokens, retain_tokens):
    compare(fp64_model, batch, ExecutorConfig(block_tokens, retain_tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_all_budgets(name):
    model = tiny_model(name, torch.float64)
    for budgets in BUDGETS:
        for seed in range(3):
            batch = random_batch(np.random.default_rng(seed), 12, 30, VOCAB_SIZE)
            compare(model, batch, ExecutorConfig(*budgets))
        compare(model, long_batch(2), ExecutorConfig(*budgets))
        for batch in SHAPES.values():
            compare(model, batch, ExecutorConfig(*budgets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUICK)
def test_rounding_is_no_worse_than_dense(name, dtype):
    truth, model = tiny_model(name, torch.float64), tiny_model(name, dtype)
    with torch.no_grad():
        for p64, p in zip(truth.parameters(), model.parameters(), strict=True):
            p64.copy_(p.double())
    batch = long_batch(3)[::3]

    def loss(index, logprobs, entropy):
        """Smooth: rounding takes a clipped ratio across its bound, or not."""
        generator = torch.Generator().manual_seed(index)
        return (logprobs * torch.randn(len(logprobs), generator=generator)).sum()

    oracle.forward_backward(truth, batch, loss)
    want = gradients(truth)
    oracle.forward_backward(model, batch, loss)
    dense_error = relative_error(gradients(model), want)
    TreeExecutor(model, ExecutorConfig(block_tokens=32)).forward_backward(
        PrefixTree.from_sequences(batch), loss
    )
    tree_error = relative_error(gradients(model), want)
    assert tree_error <= 1.5 * dense_error


def test_a_critic():
    config = tiny_model("qwen3_next").config
    config.num_labels, config.classifier_dropout = 1, 0.0
    model = AutoModelForTokenClassification.from_config(
        config, experts_implementation="eager"
    )
    model = model.double().train()
    keep_fp64(model)
    batch = small_batch(4)
    want = 0.0
    for i, sequence in enumerate(batch):
        values = oracle.value_output(model, sequence).values
        (values.sum() * (i + 1)).backward()
        want += float(values.sum().detach()) * (i + 1)
    want_grad = gradients(model)
    executor = TreeExecutor(model, ExecutorConfig(6, 10), outputs="values")
    tree = PrefixTree.from_sequences(batch)
    got = executor.forward_backward(tree, lambda i, values: values.sum() * (i + 1))
    assert abs(got - want) <= 1e-10 * abs(want)
    assert relative_error(gradients(model), want_grad) <= 1e-10


@pytest.mark.parametrize("name", QUICK)
def test_frozen_layers_and_adapters(name):
    """The first layers have no graph of their own; states carry one all the same."""
    model = tiny_model(name, torch.float64)
    batch = small_batch(5)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in parameter_name)
    compare(model, batch, ExecutorConfig(6, 0))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["in_proj", "in_proj_qkv"])
    adapted = get_peft_model(model, config).double().train()
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.1)
    compare(adapted, batch, ExecutorConfig(6, 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUICK)
def test_the_self_check_passes(name, dtype):
    model = tiny_model(name, dtype, attn_implementation="eager")
    check_on_tiny_tree(TreeExecutor(model))
    assert all(p.grad is None for p in model.parameters())


def test_the_self_check_finds_a_wrong_state(monkeypatch):
    from areal_dta.executor.states.trunk_states import TrunkStates

    own = TrunkStates.enter

    def enter(self, segment, with_grad):
        states = own(self, segment, with_grad)
        return {key: (x.detach() * 0.9).requires_grad_() for key, x in states.items()}

    monkeypatch.setattr(TrunkStates, "enter", enter)
    with pytest.raises(UnsupportedModelError, match="hidden states of layer 0"):
        check_on_tiny_tree(TreeExecutor(tiny_model("qwen3_5_text")))


@pytest.mark.parametrize("name", QUICK)
def test_the_model_is_given_back(name):
    model = tiny_model(name)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    before = model(tokens).logits
    batch = [[1, 2, 3, 4], [1, 2, 5]]
    executor = TreeExecutor(model, ExecutorConfig(2))
    executor.forward_backward(PrefixTree.from_sequences(batch), make_loss(batch))
    assert torch.equal(model(tokens).logits, before)
    for layer in stateful_layers(model):
        for owner, attribute, _ in layer.attributes:
            assert not (attribute == "forward" and attribute in vars(owner))


def test_a_layer_that_scans_twice_is_refused():
    model = tiny_model("qwen3_5_text")
    executor = TreeExecutor(model, ExecutorConfig(4))
    tree = PrefixTree.from_sequences([[1, 2, 3, 4, 5], [1, 2, 6]])
    executor.forward(tree)  # the first call learns what attention is asked for
    module = model.model.layers[1].linear_attn
    own = type(module).forward

    def twice(self, hidden_states, **options):
        own(self, hidden_states, **options)
        return own(self, hidden_states, **options)

    module.forward = twice.__get__(module)
    with pytest.raises(UnsupportedModelError, match="layer 1.*asked 2 times"):
        executor.forward(tree)


def test_states_go_with_their_last_child():
    """What is open is what the path needs: states are not kept for what is done."""
    from areal_dta.executor.states.trunk_states import TrunkStates

    states = {(0, "scan"): torch.arange(6.0).view(2, 3)}
    trunk = TrunkStates(states, segments=[4, 7], children=[4, 4, 7])
    for _ in range(2):
        entered = trunk.enter(4, with_grad=True)
        (2 * entered[0, "scan"]).sum().backward()
        trunk.leave(4, entered)
    with pytest.raises(KeyError):
        trunk.enter(4, with_grad=True)
    assert trunk.enter(7, with_grad=False)[0, "scan"].tolist() == [[3.0, 4.0, 5.0]]
    assert trunk.grads[0, "scan"].tolist() == [[4.0] * 3, [0.0] * 3]
