"""The tree engine against AReaL's own, through the calls that AReaL makes."""

import sys
from types import SimpleNamespace

import pytest
import torch
from areal.api.cli_args import (
    MicroBatchSpec,
    OptimizerConfig,
    RejectionSamplingConfig,
)
from areal.engine.fsdp_engine import FSDPPPOActor
from areal.utils import stats_tracker
from transformers import Qwen3ForCausalLM

from areal_dta.config.engine_options import DTAOptions
from areal_dta.config.schema import DTAPPOActorConfig
from areal_dta.engine import DensePPOActor, DTAPPOActor
from areal_dta.executor.kernels.triton_ops import is_interpreted
from tests.engine.builders import (
    actor_config,
    build_engine,
    grpo_batch,
    one_sequence_each,
    relative_error,
    rows_of,
    save_tiny_hybrid,
)
from tests.engine.checks import (
    FP32,
    assert_same_statistics,
    assert_same_update,
    entropy_loss,
    grpo_loss,
    labelled,
    loss_tokens,
    token_weight,
    train_once,
)

pytestmark = pytest.mark.usefixtures("world")


def stock(model, batch, **overrides):
    """AReaL's engine, one sequence a micro-batch: packed sdpa leaks."""
    spec = one_sequence_each(len(batch["input_ids"]))
    return build_engine(FSDPPPOActor, actor_config(model, mb_spec=spec, **overrides))


def tree(model, dta=None, **overrides):
    config = actor_config(model, **overrides)
    if dta is not None:
        config = DTAPPOActorConfig(**vars(config), dta=dta)
    return build_engine(DTAPPOActor, config)


@pytest.mark.slow
@pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1")
def test_fused_layers_of_the_tree_engine_and_its_dense_twin(tiny_model):
    """Both run the model's norms, SwiGLU and rotary embeddings as fused kernels, on
    parameters that FSDP2 shards, and update as AReaL's engine does without."""
    batch = grpo_batch(1, 3)
    expected = train_once(stock(tiny_model, batch), batch)
    options = DTAOptions(fused_layers="on")
    fused = tree(tiny_model, options, ppo_n_minibatches=1)
    replaced = {"Qwen3RMSNorm": 9, "Qwen3MLP": 2, "apply_rotary_pos_emb": 1}
    assert fused.runner.executor.fused.replaced == replaced
    assert_same_update(train_once(fused, batch), expected)
    modeling = sys.modules[Qwen3ForCausalLM.__module__]
    before = modeling.apply_rotary_pos_emb
    try:
        config = actor_config(tiny_model, mb_spec=one_sequence_each(3))
        config = DTAPPOActorConfig(**vars(config), dta=options)
        dense = build_engine(DensePPOActor, config)
        assert "forward" in vars(dense.model.model.norm)
        assert modeling.apply_rotary_pos_emb is not before
        assert_same_update(train_once(dense, batch), expected)
    finally:
        modeling.apply_rotary_pos_emb = before


@pytest.mark.parametrize("model", ["tiny_model", "tied_model"])
def test_train_batch_with_the_grpo_loss(model, request):
    path, batch = request.getfixturevalue(model), grpo_batch()
    expected = train_once(stock(path, batch), batch)
    assert_same_update(train_once(tree(path), batch), expected)


@pytest.mark.parametrize("dta", [None, DTAOptions(4, 0), DTAOptions(6)], ids=str)
def test_layers_with_a_state(tmp_path, dta):
    path, batch = save_tiny_hybrid(tmp_path), grpo_batch()
    expected = train_once(stock(path, batch), batch)
    assert_same_update(train_once(tree(path, dta), batch), expected)


@pytest.mark.parametrize(
    "dta",
    [
        DTAOptions(block_tokens=1, retain_tokens=0),
        DTAOptions(block_tokens=4, retain_tokens=0),
        DTAOptions(block_tokens=5, retain_tokens=9),
        DTAOptions(block_tokens=7, retain_tokens=None),
    ],
    ids=str,
)
def test_budgets_do_not_change_the_update(tiny_model, dta):
    batch = grpo_batch()
    expected = train_once(tree(tiny_model), batch)
    actual = train_once(tree(tiny_model, dta), batch)
    assert_same_update(actual, expected)
    assert_same_statistics(actual, expected)
    assert actual["stats"]["dta/loss"] == pytest.approx(
        expected["stats"]["dta/loss"], abs=1e-6
    )
    assert actual["stats"]["dta/num_blocks"] > expected["stats"]["dta/num_blocks"]


def test_order_of_rows_does_not_change_the_update(tiny_model):
    batch = grpo_batch()
    order = torch.randperm(
        len(batch["input_ids"]), generator=torch.Generator().manual_seed(1)
    )
    shuffled = rows_of(batch, order.tolist())
    actual = train_once(tree(tiny_model, DTAOptions(block_tokens=6)), shuffled)
    assert_same_update(actual, train_once(tree(tiny_model), batch))


@pytest.mark.parametrize(
    "spec",
    [
        MicroBatchSpec(n_mbs=2),
        MicroBatchSpec(n_mbs=6),
        MicroBatchSpec(max_tokens_per_mb=40),
        MicroBatchSpec(n_mbs=3, packing_algorithm="kk"),
    ],
    ids=str,
)
def test_micro_batches(tiny_model, spec):
    batch = grpo_batch()
    engine = tree(tiny_model, DTAOptions(block_tokens=8), mb_spec=spec)
    actual = train_once(engine, batch)
    assert_same_update(actual, train_once(stock(tiny_model, batch), batch))
    assert actual["result"]["num_micro_batches"] >= 2


def test_temperature_entropy_and_loss_weights(tiny_model):
    batch = grpo_batch(seed=3)
    arguments = batch, entropy_loss, token_weight
    expected = train_once(stock(tiny_model, batch, temperature=0.7), *arguments)
    engine = tree(tiny_model, DTAOptions(block_tokens=6), temperature=0.7)
    actual = train_once(engine, *arguments)
    assert_same_update(actual, expected)
    cold = train_once(tree(tiny_model), *arguments)
    assert relative_error(cold["gradients"], expected["gradients"]) > 0.01


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"rejection_sampling": None},
        {"importance_sampling_level": "sequence"},
        {
            "rejection_sampling": RejectionSamplingConfig(
                level="sequence", upper=1.05, lower=0.97
            )
        },
        {"prox_logp_method": "metrics"},
        {
            "use_sapo_loss": True,
            "use_decoupled_loss": False,
            "rejection_sampling": None,
        },
    ],
    ids=lambda o: next(iter(o), "default"),
)
def test_statistics_equal_one_call_of_the_loss(tiny_model, overrides):
    """AReaL calls the loss once here, the tree engine once a block."""
    batch, loss_fn = grpo_batch(), grpo_loss(**overrides)
    # A leak-free packed reference: one dense micro-batch of all sequences.
    dense = build_engine(DensePPOActor, actor_config(tiny_model))
    expected = train_once(dense, batch, loss_fn)
    engine = tree(tiny_model, DTAOptions(block_tokens=6))
    actual = train_once(engine, batch, loss_fn)
    assert actual["stats"]["dta/num_blocks"] > 3
    assert_same_update(actual, expected)
    assert_same_statistics(actual, expected)


def test_loss_and_tree_statistics(tiny_model):
    batch = grpo_batch()
    stats = train_once(tree(tiny_model), batch)["stats"]
    lengths = batch["attention_mask"].sum(-1)
    prefixes = {
        tuple(row[: n + 1].tolist())
        for row, length in zip(batch["input_ids"], lengths, strict=True)
        for n in range(length)
    }
    assert stats["dta/sequence_tokens"] == lengths.sum()
    assert stats["dta/tree_tokens"] == len(prefixes)
    assert 0 < stats["dta/computed_tokens"] <= len(prefixes)
    assert stats["dta/sharing_ratio"] == lengths.sum() / len(prefixes)
    assert 1 < stats["dta/predicted_saving"] < 4
    # the mean over loss tokens of what AReaL reports token by token
    kept = stats["actor_loss/avg"]
    assert stats["dta/loss"] == pytest.approx(kept, abs=1e-6)


def test_recomputed_tokens_are_counted(tiny_model):
    keeping, recomputing = (
        train_once(tree(tiny_model, DTAOptions(4, retain)), grpo_batch())["stats"]
        for retain in (None, 0)
    )
    assert recomputing["dta/computed_tokens"] > keeping["dta/computed_tokens"]
    assert recomputing["dta/predicted_saving"] < keeping["dta/predicted_saving"]


def test_forward_batch(tiny_model):
    batch = grpo_batch()
    reference = stock(tiny_model, batch, temperature=0.7)
    engine = tree(tiny_model, DTAOptions(block_tokens=5), temperature=0.7)
    expected, actual = reference.forward_batch(batch), engine.forward_batch(batch)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    torch.testing.assert_close(
        labelled(actual, batch), labelled(expected, batch), rtol=0, atol=1e-5
    )
    last = batch["attention_mask"].sum(-1) - 1
    assert not actual[torch.arange(len(last)), last].any()


def test_forward_batch_of_trajectories(tiny_model):
    batch = grpo_batch()
    engine = tree(tiny_model, mb_spec=MicroBatchSpec(n_mbs=2))
    whole = engine.forward_batch(batch)
    parts = [rows_of(batch, [0, 1]), rows_of(batch, [2, 3, 4]), rows_of(batch, [5])]
    outputs = engine.forward_batch(parts)
    assert [len(x) for x in outputs] == [2, 3, 1]
    torch.testing.assert_close(torch.cat(outputs), whole)
    joined = engine.forward_batch(batch, aggregate_fn=lambda xs: torch.cat(xs, dim=-1))
    torch.testing.assert_close(joined, whole)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_eval_batch(tiny_model, num_micro_batches):
    batch = grpo_batch()
    arguments = grpo_loss(), loss_tokens
    expected = stock(tiny_model, batch).eval_batch(batch, *arguments)
    spec = MicroBatchSpec(n_mbs=num_micro_batches)
    actual = tree(tiny_model, mb_spec=spec).eval_batch(batch, *arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_one_token_and_unmasked_sequences(tiny_model):
    """A one-token sequence has no label; one without loss tokens weighs nothing."""
    batch = grpo_batch()
    batch["attention_mask"][0, 1:] = False
    batch["loss_mask"][:2] = 0
    assert_same_update(
        train_once(tree(tiny_model, DTAOptions(block_tokens=3)), batch),
        train_once(stock(tiny_model, batch), batch),
    )


def test_adam_and_clipping(tiny_model):
    """The norm is AReaL's, so gradients are clipped alike."""
    optimizer = OptimizerConfig(
        lr=1e-3, gradient_clipping=0.5, warmup_steps_proportion=0.0
    )
    batch = grpo_batch()
    expected = train_once(stock(tiny_model, batch, optimizer=optimizer), batch)
    actual = train_once(tree(tiny_model, optimizer=optimizer), batch)
    assert expected["result"]["grad_norm"] > 0.5
    assert actual["result"]["grad_norm"] == pytest.approx(
        expected["result"]["grad_norm"], rel=FP32
    )
    assert relative_error(actual["gradients"], expected["gradients"]) <= FP32


def test_a_failing_loss_leaves_the_engine_usable(tiny_model):
    batch = grpo_batch()
    dta = SimpleNamespace(block_tokens=4, retain_tokens=None, loss_scope="sequence")
    engine = tree(tiny_model, dta)
    calls = []

    def failing_loss(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no loss today")
        return grpo_loss()(*args, **kwargs)

    with pytest.raises(RuntimeError, match="no loss today"):
        train_once(engine, batch, failing_loss)
    stats_tracker.export_all()
    assert_same_update(
        train_once(engine, batch), train_once(stock(tiny_model, batch), batch)
    )


def test_weights_that_do_not_add_up_are_refused(tiny_model):
    with pytest.raises(ValueError, match="adds up over sequences"):
        train_once(tree(tiny_model), grpo_batch(), weight_fn=lambda mb: torch.ones(()))


def test_a_batch_without_loss_tokens_is_refused(tiny_model):
    batch = grpo_batch()
    batch["loss_mask"].zero_()
    with pytest.raises(ValueError, match="expected more than 0"):
        train_once(tree(tiny_model), batch)


@pytest.mark.parametrize("dta", [DTAOptions(), DTAOptions(6, 0)], ids=str)
def test_bf16_is_as_close_to_fp32_as_dense_bf16(tiny_model, dta):
    batch = grpo_batch(num_prompts=4, num_samples=4)

    def error(update):
        """Compare all parameters together with fp32."""
        squares = [
            (float((update["gradients"][n] - e).norm() ** 2), float(e.norm() ** 2))
            for n, e in expected["gradients"].items()
        ]
        return (sum(d for d, _ in squares) / sum(e for _, e in squares)) ** 0.5

    expected = train_once(stock(tiny_model, batch), batch)
    dense = train_once(stock(tiny_model, batch, dtype="bfloat16"), batch)
    ours = train_once(tree(tiny_model, dta, dtype="bfloat16"), batch)
    assert all(g.dtype == torch.float32 for g in ours["gradients"].values())
    # measured on four seeds: 0.7 to 1.25 times
    assert 0 < error(ours) <= 1.5 * error(dense)


def test_an_engine_without_optimizer_computes_logprobs(tiny_model):
    """The engine as the trainer's reference model."""
    batch = grpo_batch()
    reference, trained = tree(tiny_model, optimizer=None), tree(tiny_model)
    torch.testing.assert_close(
        reference.forward_batch(batch), trained.forward_batch(batch)
    )


def test_calls_can_be_mixed(tiny_model):
    """Evaluating between updates leaves no trace in them."""
    batch = grpo_batch()
    plain, mixed = tree(tiny_model), tree(tiny_model)
    for _ in range(2):
        expected = train_once(plain, batch)
        mixed.forward_batch(batch)
        mixed.eval_batch(batch, grpo_loss(), loss_tokens)
        stats_tracker.export_all()
        actual = train_once(mixed, batch)
        assert relative_error(actual["parameters"], expected["parameters"]) == 0
