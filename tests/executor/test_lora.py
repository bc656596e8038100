"""LoRA (peft): only the adapters get gradients, and these equal the oracle's."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from areal_dta.executor import ExecutorConfig, TreeExecutor, oracle
from areal_dta.tree import PrefixTree
from tests.builders import random_batch
from tests.models import VOCAB_SIZE, relative_error, tiny_model


def with_adapters(dtype, target_modules, name="qwen3"):
    """Build a model whose adapters have an effect: B matrices start at zero."""
    torch.manual_seed(1)
    base = tiny_model(name, dtype)
    base.enable_input_require_grads()  # as AReaL does
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=target_modules, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def sequence_loss(index, logprobs, entropy):
    generator = torch.Generator().manual_seed(index)
    weight = torch.randn(len(logprobs), generator=generator, dtype=torch.float64)
    weight = weight.to(logprobs.dtype)
    return (logprobs * weight).sum() + 0.3 * (entropy**2 * weight).sum()


def take(model):
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float64, 1e-10), (torch.float32, 1e-5),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("targets, name", [
    ("all-linear", "qwen3"),
    (["q_proj", "v_proj"], "qwen3-tied"),
    (["q_proj", "lm_head"], "qwen3"),
    (["down_proj", "embed_tokens"], "qwen3"),
], ids=["all-linear", "attention, tied", "head", "embedding"])  # fmt: skip
@pytest.mark.parametrize("budgets", [(7, 0), (64, None)])
def test_adapters_learn_as_they_do_densely(dtype, tolerance, targets, name, budgets):
    model = with_adapters(dtype, targets, name)
    batch = random_batch(np.random.default_rng(1), 10, 24, VOCAB_SIZE)
    executor = TreeExecutor(model, ExecutorConfig(*budgets, temperature=0.8))

    outputs = executor.forward(PrefixTree.from_sequences(batch))
    expected = oracle.sequence_outputs(model, batch, 0.8)
    for got, want in zip(outputs, expected, strict=True):
        assert relative_error(got.logprobs, want.logprobs) <= tolerance

    oracle.forward_backward(model, batch, sequence_loss, 0.8)
    want_grads = take(model)
    executor.forward_backward(PrefixTree.from_sequences(batch), sequence_loss)
    got_grads = take(model)
    assert got_grads.keys() == want_grads.keys()
    assert got_grads and all("lora_" in name for name in got_grads)
    for key, want in want_grads.items():
        assert relative_error(got_grads[key], want) <= tolerance, key
    assert model.config._attn_implementation == "sdpa"


def test_a_head_with_adapters_keeps_its_own_projection():
    plain = with_adapters(torch.float32, ["q_proj"])
    adapted = with_adapters(torch.float32, ["q_proj", "lm_head"])
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2, 4]])
    for model, is_fused in ((plain, True), (adapted, False)):
        executor = TreeExecutor(model)
        executor.forward(tree)
        assert (executor._head.capture.head is not None) == is_fused


def test_a_frozen_head_costs_no_gradient_of_the_vocabulary():
    """Nothing of the shape of the largest matrix may be allocated in a backward."""
    model = with_adapters(torch.float32, ["q_proj"])
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape == weight.shape:
                if out.untyped_storage().data_ptr() != weight.data_ptr():
                    made.append(str(func))
            return out

    weight = model.get_output_embeddings().weight
    executor = TreeExecutor(model)
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2, 4]])
    with Watch():
        executor.forward_backward(tree, sequence_loss)
    assert not made
