"""A rank's rows as AReaL's micro-batches and packed loss inputs."""

import pytest
import torch
from areal.api.cli_args import MicroBatchSpec
from areal.engine.fsdp_engine import FSDPEngine

from areal_dta.engine.batch import RankBatch, load_batch
from tests.engine.builders import actor_config, build_engine, grpo_batch

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "spec",
    [MicroBatchSpec(), MicroBatchSpec(n_mbs=3), MicroBatchSpec(max_tokens_per_mb=40)],
    ids=str,
)
def test_packed_as_areal_packs(tiny_model, world, spec):
    """Keys, values and rows of every micro-batch, against AReaL's own."""
    batch = grpo_batch() | {"scale": 0.5}
    engine = build_engine(FSDPEngine, actor_config(tiny_model, mb_spec=spec))
    theirs = engine._prepare_mb_list(dict(batch)).mbs
    ours = load_batch(batch, spec)
    assert len(ours.micro_batches) == len(theirs)
    for rows, expected in zip(ours.micro_batches, theirs, strict=True):
        actual = ours.pack(rows, CPU)
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            if torch.is_tensor(value):
                torch.testing.assert_close(actual[key], value, rtol=0, atol=0)
            else:
                assert actual[key] == value, key


def test_values_of_a_row_go_with_it():
    batch = grpo_batch() | {
        "weight": torch.arange(6.0),
        "names": list("abcdef"),
        "features": torch.arange(6 * 2).reshape(6, 2),
    }
    packed = load_batch(batch, MicroBatchSpec()).pack([4, 1], CPU)
    assert packed["weight"].tolist() == [4, 1]
    assert packed["names"] == ["e", "b"]
    assert packed["features"].tolist() == [[8, 9], [2, 3]]


@pytest.mark.parametrize(
    "empty", [[], {}, "rows", "list of rows"], ids=["list", "dict", "rows", "items"]
)
def test_no_rows(empty):
    rows = {k: v[:0] for k, v in grpo_batch().items()}
    given = {"rows": rows, "list of rows": [rows, rows]}
    batch = load_batch(
        given[empty] if isinstance(empty, str) else empty, MicroBatchSpec()
    )
    assert batch.num_rows == 0 and batch.micro_batches == []
    assert batch.sequences() == ([], [])


def test_fewer_rows_than_micro_batches():
    rows = {k: v[:2] for k, v in grpo_batch().items()}
    spec = MicroBatchSpec(n_mbs=8, n_mbs_divisor=4)
    assert sorted(load_batch(rows, spec).micro_batches) == [[0], [1]]


def test_rows_without_tokens_are_no_sequences():
    batch = grpo_batch()
    batch["attention_mask"][2] = False
    loaded = load_batch(batch, MicroBatchSpec())
    sequences, row_of = loaded.sequences()
    assert row_of == [0, 1, 3, 4, 5] and all(len(s) for s in sequences)
    assert loaded.lengths[2] == 0


def test_left_padding_is_refused():
    batch = grpo_batch()
    batch["attention_mask"] = batch["attention_mask"].flip(-1)
    with pytest.raises(ValueError, match="not right-padded"):
        load_batch(batch, MicroBatchSpec())


def test_a_row_longer_than_a_micro_batch_is_named():
    with pytest.raises(ValueError, match=r"max_tokens_per_mb=5 < row \d+ \(\d+ tokens"):
        load_batch(grpo_batch(), MicroBatchSpec(max_tokens_per_mb=5))


def test_missing_keys_are_named():
    with pytest.raises(ValueError, match="lacks .'attention_mask'.*got the keys"):
        load_batch({"input_ids": torch.ones(2, 3)}, MicroBatchSpec())


def test_labels_are_padded_to_tokens():
    batch = RankBatch({}, [3, 1, 2, 0], [[0, 1, 2], [3]], None)
    found = {0: torch.tensor([1.0, 2.0]), 2: torch.tensor([3.0])}
    cpu = torch.device("cpu")
    assert batch.pack_outputs([0, 1, 2], found, cpu).tolist() == [1, 2, 0, 0, 3, 0]
    assert batch.pack_outputs([3], found, cpu).tolist() == []
