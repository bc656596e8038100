"""Memory: chosen budgets, running out of it, and parameters gathered by the layer."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from areal_dta.areal_fixes.fsdp2 import fill_missing_gradients, fsdp_modules
from areal_dta.engine import DTAPPOActor, fsdp_gather_layer, fsdp_gather_step
from areal_dta.executor.block import BlockRunner
from tests.engine.builders import (
    actor_config,
    build_engine,
    grpo_batch,
    relative_error,
)
from tests.engine.checks import grpo_loss, loss_tokens, train_once

pytestmark = pytest.mark.usefixtures("world")
FP32 = 1e-5


def engine_with(model, **options):
    config = actor_config(model)
    values = {"block_tokens": 8, "retain_tokens": 16, "self_check": False, **options}
    config.dta = SimpleNamespace(**values)
    return build_engine(DTAPPOActor, config)


@pytest.fixture
def log():
    """What is logged; AReaL's loggers do not propagate."""
    records: list[str] = []

    class Keep:
        def info(self, message, *args):
            records.append(message)

        warning = error = debug = info

    return Keep(), records


def failing_once(monkeypatch, at_block, error):
    """The model call number ``at_block`` fails, the first time it comes up."""
    run, calls = BlockRunner.run, []

    def fake(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == at_block:
            raise error
        return run(self, *args, **kwargs)

    monkeypatch.setattr(BlockRunner, "run", fake)
    return calls


def assert_same_step(actual, expected):
    assert relative_error(actual["gradients"], expected["gradients"]) <= FP32
    assert relative_error(actual["parameters"], expected["parameters"]) <= FP32
    assert actual["stats"].keys() == expected["stats"].keys()
    for key, value in expected["stats"].items():
        # budgets decide how many blocks there are and what is computed twice
        if not key.startswith(("dta/num_blocks", "dta/computed", "dta/predicted")):
            assert actual["stats"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


@pytest.fixture(scope="module")
def expected(world, tiny_model):
    return train_once(engine_with(tiny_model), grpo_batch())


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't "
                 "allocate memory: you tried to allocate 9 bytes."),
], ids=["cuda", "cpu"])  # fmt: skip
@pytest.mark.parametrize("at_block", [1, 5])
def test_out_of_memory_in_training(
    tiny_model, monkeypatch, expected, log, error, at_block
):
    engine = engine_with(tiny_model)
    engine.runner.logger, records = log
    calls = failing_once(monkeypatch, at_block, error)
    actual = train_once(engine, grpo_batch())
    assert len(calls) > at_block
    assert_same_step(actual, expected)
    assert engine.runner.executor.config.retain_tokens == 0
    (message,) = records
    assert "out of memory" in message and "retain_tokens 16 -> 0" in message
    # what was chosen stays, and so does the temperature
    assert engine.runner.executor.config == dataclasses.replace(
        engine.runner.executor.config,
        block_tokens=8,
        temperature=engine.config.temperature,
    )


def test_out_of_memory_in_a_backward(tiny_model, monkeypatch, expected):
    """Gradients exist already, and FSDP is in the middle of its hooks."""
    engine = engine_with(tiny_model)
    backward, calls = torch.autograd.backward, []

    def fake(roots, *args, **kwargs):
        calls.append(roots)
        if len(calls) == 3:
            roots[0].register_hook(lambda grad: _raise())
        return backward(roots, *args, **kwargs)

    def _raise():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.autograd, "backward", fake)
    assert_same_step(train_once(engine, grpo_batch()), expected)


def test_out_of_memory_in_a_forward_only_pass(tiny_model, monkeypatch):
    engine, batch = engine_with(tiny_model, block_tokens=64), grpo_batch()
    want = engine.forward_batch(batch)
    failing_once(monkeypatch, 1, torch.OutOfMemoryError("CUDA out of memory"))
    torch.testing.assert_close(engine.forward_batch(batch), want)
    config = engine.runner.executor.config
    assert (config.block_tokens, config.retain_tokens) == (32, 16)


def test_the_whole_model_is_gathered_where_it_fits(
    tiny_model, monkeypatch, expected, log
):
    engine = engine_with(tiny_model)
    engine.runner.logger, records = log
    monkeypatch.setattr(fsdp_gather_layer, "usable_memory", lambda *args: 0.0)
    assert_same_step(train_once(engine, grpo_batch()), expected)
    assert engine.runner.executor.pace.waits_for_others  # layer by layer
    assert "reshard=block: the whole model does not fit" in records[0]
    # What is set is not chosen, and single sequences need the whole model.
    for options in ({"reshard": "step"}, {"verify_every": 5}):
        engine = engine_with(tiny_model, **options)
        engine.runner._choose_reshard()
        assert not engine.runner.executor.pace.waits_for_others


def test_larger_budgets_come_back(tiny_model, monkeypatch, log):
    """After some passes without a shortage; the wait doubles."""
    engine = engine_with(tiny_model, block_tokens=64)
    runner = engine.runner
    runner.logger, records = log
    runner._patience = 2
    failing_once(monkeypatch, 1, torch.OutOfMemoryError("CUDA out of memory"))
    blocks = []
    for _ in range(3):
        train_once(engine, grpo_batch())
        blocks.append(runner.executor.config.block_tokens)
    assert blocks == [32, 64, 64]
    assert "64 -> 32" in records[0] and "block_tokens=64" in records[1]
    assert runner._patience == 4 and len(records) == 2


@pytest.mark.parametrize("training", [True, False])
def test_no_room_for_the_parameters(tiny_model, monkeypatch, training):
    """Found before anything is gathered, so that no other rank waits for it."""
    engine, batch = engine_with(tiny_model), grpo_batch()
    told, gathered = [], []

    def reserve(sizes, device):
        assert sum(sizes) > 0 and not gathered
        raise torch.OutOfMemoryError("CUDA out of memory")

    count = fsdp_gather_step.count_failures
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_gather_step, "reserve", reserve)
        patch.setattr(
            fsdp_gather_step,
            "count_failures",
            lambda group, failed: told.append(failed) or count(group, failed),
        )
        patch.setattr(FSDPModule, "unshard", lambda self: gathered.append(self))
        with pytest.raises(torch.OutOfMemoryError):
            if training:
                engine.train_batch(batch, grpo_loss(), loss_tokens)
            else:
                engine.forward_batch(batch)
    assert told == [True]
    train_once(engine, batch)  # and the model is as it was


def test_no_room_for_the_reduction(tiny_model, monkeypatch):
    """The others wait at the end of the pass, where this rank tells them."""
    engine, batch = engine_with(tiny_model), grpo_batch()
    reserve, told, calls = fsdp_gather_step.reserve, [], []

    def second_fails(sizes, device):
        calls.append(sizes)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return reserve(sizes, device)

    count = fsdp_gather_step.count_failures
    monkeypatch.setattr(fsdp_gather_step, "reserve", second_fails)
    monkeypatch.setattr(
        fsdp_gather_step,
        "count_failures",
        lambda group, failed: told.append(failed) or count(group, failed),
    )
    with pytest.raises(torch.OutOfMemoryError):
        engine.train_batch(batch, grpo_loss(), loss_tokens)
    assert told == [False, True]
    train_once(engine, batch)


def test_accumulated_gradients_are_not_filled_with_zeros(world):
    """In bf16 FSDP2 has moved all of them to fp32; only experts that no token chose,
    here a layer that is not used, have none."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)
    for module in fsdp_modules(model):
        module.unshard()
    model[1](model[0](torch.ones(2, 4))).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [True] * 6
    assert fill_missing_gradients(model) == 2
    assert [p.grad is None for p in model.parameters()] == [True] * 4 + [False] * 2


def test_nothing_smaller_is_left(tiny_model, monkeypatch):
    engine = engine_with(tiny_model, retain_tokens=0)  # blocks of 8: the smallest
    error = torch.OutOfMemoryError("CUDA out of memory")
    failing_once(monkeypatch, 1, error)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        engine.train_batch(grpo_batch(), grpo_loss(), loss_tokens)
    assert "reshard=block, more ranks or shorter" in caught.value.__notes__[0]


def test_other_errors_are_not_repeated(tiny_model, monkeypatch):
    engine = engine_with(tiny_model)
    calls = failing_once(monkeypatch, 1, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        engine.train_batch(grpo_batch(), grpo_loss(), loss_tokens)
    assert len(calls) == 1


@pytest.mark.parametrize("retain_tokens", [0, None])
def test_parameters_gathered_by_the_layer(tiny_model, expected, retain_tokens):
    by_layer = engine_with(tiny_model, reshard="block", retain_tokens=retain_tokens)
    by_step = engine_with(tiny_model)
    batch = grpo_batch()
    for method in ("eval", "forward"):
        got, want = (
            engine.eval_batch(batch, grpo_loss(), loss_tokens)
            if method == "eval"
            else engine.forward_batch(batch)
            for engine in (by_layer, by_step)
        )
        torch.testing.assert_close(got, want)
        for engine in (by_layer, by_step):
            engine.export_stats()
    assert_same_step(train_once(by_layer, batch), expected)


def test_out_of_memory_with_ranks_in_step_is_raised(tiny_model, monkeypatch):
    engine = engine_with(tiny_model, reshard="block")
    failing_once(monkeypatch, 3, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        engine.train_batch(grpo_batch(), grpo_loss(), loss_tokens)
    assert "ranks in step cannot repeat" in caught.value.__notes__[0]


def test_budgets_are_chosen_at_the_first_batch(tiny_model, expected, log):
    engine = engine_with(tiny_model, block_tokens="auto", retain_tokens="auto")
    engine.runner.logger, records = log
    assert_same_step(train_once(engine, grpo_batch()), expected)
    config = engine.runner.executor.config
    # a tiny model in a machine's memory: the largest block, and everything retained
    assert config.block_tokens == 512
    assert config.retain_tokens is not None and config.retain_tokens > 10_000
    assert "bytes measured" in records[0] and "GiB predicted of" in records[1]
    engine.forward_batch(grpo_batch())
    assert len(records) == 2  # chosen once, for paths up to this length


@pytest.mark.parametrize("options, expected_config", [
    ({"block_tokens": "auto", "retain_tokens": 24}, (512, 24)),
    ({"block_tokens": "auto", "retain_tokens": None}, (512, None)),
    ({"block_tokens": 16, "retain_tokens": "auto"}, (16, "chosen")),
])  # fmt: skip
def test_what_is_set_is_kept(tiny_model, options, expected_config):
    engine = engine_with(tiny_model, **options)
    engine.forward_batch(grpo_batch())
    config = engine.runner.executor.config
    block, retain = expected_config
    assert config.block_tokens == block
    if retain == "chosen":
        assert config.retain_tokens is not None and config.retain_tokens % 16 == 0
    else:
        assert config.retain_tokens == retain


def test_little_memory_makes_small_budgets(tiny_model, expected, monkeypatch, log):
    name = "areal_dta.engine.oom_retry.usable_memory"
    monkeypatch.setattr(name, lambda device, num_processes: 3e5)
    engine = engine_with(tiny_model, block_tokens="auto", retain_tokens="auto")
    engine.runner.logger, records = log
    assert_same_step(train_once(engine, grpo_batch()), expected)
    config = engine.runner.executor.config
    assert (config.block_tokens, config.retain_tokens) == (32, 0)
    assert "predicted not to fit" in records[-1]
