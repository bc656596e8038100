"""Skipped updates leave their batch; verified ones leave no trace."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from areal.api.cli_args import OptimizerConfig

from areal_dta.config.engine_options import DTAOptions
from areal_dta.config.schema import DTAPPOActorConfig
from areal_dta.engine import DTAPPOActor
from areal_dta.engine.dense_engines import DensePPOActor
from areal_dta.engine.watch import verify
from areal_dta.engine.watch.skipped_steps import MAX_FILES
from tests.engine.builders import (
    VOCAB_SIZE,
    actor_config,
    build_engine,
    grpo_batch,
    parameters,
    rows_of,
    save_tiny_model,
)
from tests.engine.checks import grpo_loss, loss_tokens
from tests.engine.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("world")

BATCH = grpo_batch()


def engine(model: Path, cls: Any = DTAPPOActor, **dta: Any) -> Any:
    adam = OptimizerConfig(
        type="adam", lr=0.01, lr_scheduler_type="constant", warmup_steps_proportion=0.0
    )
    config = actor_config(model, optimizer=adam)
    options = DTAOptions(block_tokens=4, retain_tokens=6, self_check=False, **dta)
    return build_engine(cls, DTAPPOActorConfig(**vars(config), dta=options))


def spoiled_loss(factor: float, offset: float = 0.0) -> Any:
    loss = grpo_loss()

    @functools.wraps(loss)
    def spoiled(*args: Any, **kwargs: Any) -> torch.Tensor:
        return loss(*args, **kwargs) * factor + offset

    return spoiled


@pytest.mark.parametrize("cls", [DTAPPOActor, DensePPOActor])
@pytest.mark.parametrize(
    ("factor", "offset"),
    [(math.nan, 0.0), (1.0, math.inf)],
    ids=["gradient", "loss alone"],
)
def test_a_skipped_update_leaves_weights_and_a_file(
    tiny_model: Path, tmp_path: Path, cls: Any, factor: float, offset: float
) -> None:
    if cls is DensePPOActor and math.isfinite(factor):
        pytest.skip("AReaL's own engine looks at the gradient only")
    actor = engine(tiny_model, cls, skipped_dir=str(tmp_path / "skipped"))
    before = parameters(actor)
    loss = spoiled_loss(factor, offset)
    stats = actor.train_batch(dict(BATCH), loss, loss_tokens)
    assert stats["update_successful"] == 0.0
    after = parameters(actor)
    assert all(torch.equal(after[name], before[name]) for name in before)
    from bench.workloads import Sizes, load  # not in the processes of ranks

    # the file holds the batch, and the benchmark opens it
    (path,) = (tmp_path / "skipped").glob("*.npz")
    with np.load(path, allow_pickle=False) as file:
        assert np.isfinite(file["token_advantages"]).all()
    workload = load("skipped", path, Sizes(vocab_size=VOCAB_SIZE, max_sequences=99))
    lengths = BATCH["attention_mask"].sum(-1).tolist()
    assert [len(sequence) for sequence in workload.sequences] == lengths
    for row, (sequence, mask) in enumerate(
        zip(workload.sequences, workload.loss_masks, strict=True)
    ):
        length = lengths[row]
        assert sequence.tolist() == BATCH["input_ids"][row, :length].tolist()
        rolled = BATCH["loss_mask"][row].roll(1)[:length].bool()
        assert mask.tolist() == rolled.tolist()
    # a good update follows, and the number of files is bounded
    assert actor.train_batch(dict(BATCH), grpo_loss(), loss_tokens)["update_successful"]
    for _ in range(MAX_FILES + 1):
        actor.train_batch(dict(BATCH), loss, loss_tokens)
    assert len(list((tmp_path / "skipped").glob("*.npz"))) == MAX_FILES


def two_updates(actor: Any, batch: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    stats = {}
    for _ in range(2):
        actor.train_batch(batch, grpo_loss(), loss_tokens)
        stats = {k: v for k, v in actor.export_stats().items() if "verify" in k}
    return {
        "stats": stats,
        "parameters": parameters(actor),
        "random": torch.rand(3),
        "moments": [
            value.clone()
            for state in actor.optimizer.state_dict()["state"].values()
            for value in state.values()
            if torch.is_tensor(value) and not hasattr(value, "to_local")
        ],
    }


def assert_same_bits(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert torch.equal(left["random"], right["random"])
    for name, value in left["parameters"].items():
        assert torch.equal(value, right["parameters"][name]), name
    for a, b in zip(left["moments"], right["moments"], strict=True):
        assert torch.equal(a, b)


def assert_verified(stats: dict[str, float], num_sequences: int) -> None:
    assert stats["dta/verify_logprob_difference"] < 1e-4
    assert stats["dta/verify_gradient_cosine"] > 1 - 1e-6
    assert stats["dta/verify_gradient_norm_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert stats["dta/verify_num_sequences"] == num_sequences
    assert stats["dta/verify_alarm"] == 0.0


def test_verification_leaves_no_trace(tiny_model: Path) -> None:
    plain = two_updates(engine(tiny_model), dict(BATCH))
    verified = two_updates(engine(tiny_model, verify_every=1), dict(BATCH))
    assert_same_bits(plain, verified)
    assert plain["stats"] == {}
    assert_verified(verified["stats"], 4)
    # every second update: the second one is not verified
    assert two_updates(engine(tiny_model, verify_every=2), BATCH)["stats"] == {}


def test_a_difference_raises_the_alarm(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = engine(tiny_model, verify_every=1)
    said: list[str] = []
    monkeypatch.setattr(actor.runner.logger, "warning", said.append)
    original = verify.oracle.sequence_output

    def warmer(model: Any, sequence: Any, temperature: float) -> Any:
        return original(model, sequence, 1.05 * temperature)

    monkeypatch.setattr(verify.oracle, "sequence_output", warmer)
    actor.train_batch(dict(BATCH), grpo_loss(), loss_tokens)
    assert actor.export_stats()["dta/verify_alarm"] == 1.0
    assert any("outputs differ by" in text for text in said), said


def test_out_of_memory_while_verifying_costs_the_verification_alone(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = two_updates(engine(tiny_model), dict(BATCH))

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(verify.oracle, "sequence_output", full)
    logging.disable(logging.CRITICAL)
    try:
        verified = two_updates(engine(tiny_model, verify_every=1), dict(BATCH))
    finally:
        logging.disable(logging.NOTSET)
    assert_same_bits(plain, verified)
    assert verified["stats"] == {}


def test_layer_by_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="verify_every=3 needs .* dta.reshard=step"):
        DTAOptions(verify_every=3, reshard="block")


def ranks_with_and_without(rank: int, directory: Path) -> dict[str, Any]:
    """What each of two ranks runs; rank 1 has no rows."""
    mine: Any = rows_of(BATCH, list(range(len(BATCH["input_ids"])))) if not rank else []
    model = directory / "tiny"
    plain = two_updates(engine(model), mine)
    return {
        "plain": plain,
        "verified": two_updates(engine(model, verify_every=1), mine),
    }


def test_two_ranks_one_of_them_empty(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    for result in run_ranks(ranks_with_and_without, [2], tmp_path)[2]:
        assert_same_bits(result["plain"], result["verified"])
        assert_verified(result["verified"]["stats"], 4)
