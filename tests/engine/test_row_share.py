"""Rows of items taken apart for ranks, and what they computed put together again."""

import pytest
import torch

from areal_dta.collector.controllers import split_by_order
from areal_dta.collector.planned_batch import to_planned_batch
from areal_dta.engine.row_share import (
    Share,
    in_pieces,
    join_pieces,
    narrow,
    take_rows,
    widen,
)
from tests.engine.dispatch_scenarios import make_items


def test_a_share_survives_the_way_as_text():
    share = Share((((0, 2), ()), ((), (1,))), 17)
    assert Share.from_text(share.to_text()) == share
    assert share.all_rows() == [[0, 2], [1]]


def test_rows_keep_what_is_theirs_and_lose_padding():
    (item,) = make_items((4,))
    item["names"] = ["a", "b", "c", "d"]
    item["version"] = 3
    taken = take_rows(item, [1, 3])
    lengths = item["attention_mask"].sum(-1)[[1, 3]]
    width = int(lengths.max())
    for key, value in item.items():
        if torch.is_tensor(value):
            expected = value[[1, 3]]
            expected = expected[:, :width] if value.ndim > 1 else expected
            assert torch.equal(taken[key], expected), key
    assert taken["names"] == ["b", "d"] and taken["version"] == 3
    assert take_rows(item, range(4)) is item


@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3]], [[2], [0, 3], [1]], [[3, 1], [0, 2]]]
)
def test_pieces_give_the_whole_again(parts):
    (item,) = make_items((4,))
    whole = torch.where(item["attention_mask"], item["logprobs"] + 1, 0)
    pieces = [take_rows({**item, "value": whole}, rows)["value"] for rows in parts]
    joined = join_pieces({**item, "value": in_pieces(pieces, parts)})
    assert torch.equal(joined["value"], whole)
    assert torch.equal(joined["logprobs"], item["logprobs"])


def test_widening_is_undone():
    (item,) = make_items((2,))
    num_rows, width = item["attention_mask"].shape
    wide = widen(item, width + 5)
    assert wide["input_ids"].shape == (num_rows, width + 5)
    assert torch.equal(wide["attention_mask"].sum(-1), item["attention_mask"].sum(-1))
    back = narrow(wide, num_rows, width + 5, width)
    for key, value in item.items():
        assert torch.equal(back[key], value), key


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 9])
def test_every_item_has_its_advantages_computed_once(num_ranks):
    batch = to_planned_batch(make_items((3, 1, 4, 2, 2)))
    numbers = split_by_order(batch, num_ranks)
    assert len(numbers) == num_ranks
    assert sorted(i for of_rank in numbers for i in of_rank) == [0, 1, 2, 3, 4]
    if num_ranks == 2:  # cut by tokens, not by items
        tokens = [
            sum(int(batch[i]["attention_mask"].sum()) for i in of_rank)
            for of_rank in numbers
        ]
        assert max(tokens) < 2 * min(tokens)
