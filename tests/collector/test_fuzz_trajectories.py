"""Trajectories of all kinds at the collector's door: taken in, or rejected by a rule.

Results are made valid and then damaged in up to three places, or made of anything. An
oracle that is written for one row and one token at a time says what may be trained on;
it must agree with the collector, and nothing but `Rejected` may be raised.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from areal_dta.collector.collector import Collector
from areal_dta.collector.rejections import REASONS, Rejected
from areal_dta.tree import PrefixTree

VOCAB, LONGEST, VERSION = 20, 12, 3


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Thousands of lines otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        silent = SimpleNamespace(warning=lambda message: None)
        patch.setattr("areal_dta.collector.collector.logger", silent)
        yield


_KEYS = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "rewards",
    "logprobs",
    "versions",
)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OTHERS = (torch.bool, torch.complex64)


@st.composite
def valid(draw):
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=4))
    width = max(lengths) + draw(st.integers(0, 2))
    shape = (len(lengths), width)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]

    def integers(low, high):
        values = st.lists(
            st.integers(low, high),
            min_size=mask.numel(),
            max_size=mask.numel(),
        )
        return torch.tensor(draw(values), dtype=torch.int32).reshape(shape)

    item = {
        "input_ids": integers(0, VOCAB - 1),
        "attention_mask": mask,
        "loss_mask": integers(0, 1),
        "rewards": torch.ones(len(lengths)),
        "logprobs": -integers(0, 9).float(),
        "versions": integers(-1, VERSION),
    }
    for key in draw(st.sets(st.sampled_from(_KEYS[2:]))):
        del item[key]
    return item


@st.composite
def damages(draw):
    """A key, and what becomes of its value."""
    key = draw(st.sampled_from(_KEYS))
    kind = draw(
        st.sampled_from(["value", "dtype", "cut", "flat", "gone", "other", "nothing"])
    )
    at = draw(st.tuples(st.integers(0, 3), st.integers(0, LONGEST + 1)))
    number = st.sampled_from(
        [math.nan, math.inf, -math.inf, -1.0, -2.0, 0.0, 1.0, 2.0, 4.0, VOCAB, 2**31]
    )
    dtype = st.sampled_from((*_INTEGERS, *_FLOATS, *_OTHERS))
    other = st.sampled_from(["text", 1, [[1, 2]], {"a": 1}, (), object()])
    return key, kind, at, draw(number), draw(dtype), draw(other)


def damaged(item, damage):
    key, kind, (row, column), number, dtype, other = damage
    value = item.get(key)
    if kind == "other":
        item[key] = other
    elif kind == "nothing":
        item[key] = None
    elif kind == "gone":
        item.pop(key, None)
    elif torch.is_tensor(value):
        if kind == "dtype":
            value = value.to(dtype)
        elif kind == "cut":
            value = value[..., :-1]
        elif kind == "flat":
            value = value.flatten()
        elif value.numel():
            value = value.double() if not math.isfinite(number) else value.clone()
            with_index = value.view(-1)
            index = (row * LONGEST + column) % value.numel()
            try:
                with_index[index] = number
            except RuntimeError:  # the type cannot hold it
                return
        item[key] = value


def may_be_trained(item):
    """The oracle: one token at a time, with Python's numbers."""
    item = {key: item[key] for key in _KEYS if item.get(key) is not None}
    if not {"input_ids", "attention_mask"} <= set(item):
        return False
    if not all(map(torch.is_tensor, item.values())):
        return False
    allowed = {
        "input_ids": _INTEGERS,
        "versions": _INTEGERS,
        "logprobs": _FLOATS,
        "rewards": _INTEGERS + _FLOATS,
        "attention_mask": (*_INTEGERS, *_FLOATS, torch.bool),
        "loss_mask": (*_INTEGERS, *_FLOATS, torch.bool),
    }
    if any(value.dtype not in allowed[key] for key, value in item.items()):
        return False
    shape = item["input_ids"].shape
    if len(shape) != 2 or not shape[0]:
        return False
    for key, value in item.items():
        if tuple(value.shape) != (shape[:1] if key == "rewards" else tuple(shape)):
            return False
    rows = {key: value.tolist() for key, value in item.items()}
    if not all(map(math.isfinite, rows.get("rewards", ()))):
        return False
    has_loss = False
    for row, mask in enumerate(rows["attention_mask"]):
        if any(m not in (0, 1) for m in mask):
            return False
        length = int(sum(mask))
        if not 1 <= length <= LONGEST or any(mask[length:]):
            return False
        for t in range(length):
            token = {key: rows[key][row][t] for key in rows if key != "rewards"}
            if not 0 <= token["input_ids"] < VOCAB:
                return False
            if token.get("loss_mask", 1) not in (0, 1):
                return False
            if not math.isfinite(token.get("logprobs", 0.0)):
                return False
            if not -1 <= token.get("versions", 0) <= VERSION:
                return False
            has_loss |= t > 0 and token.get("loss_mask", 1) == 1
    return has_loss


def offer(collector, item):
    """Offer an item; returns the reason of its rejection."""
    before = collector.total
    try:
        collector.offer(7, item, VERSION)
    except Rejected as rejected:
        assert collector.total == before and not collector.waiting_task_ids
        metrics = collector.take_metrics(1.0)
        assert metrics[f"collector/rejected/{rejected.reason}"] == 1
        assert metrics["collector/dropped"] == 1
        assert str(rejected)
        return rejected.reason
    return None


def check(item, changes):
    for change in changes:
        damaged(item, change)
    collector = Collector(max_sequence_tokens=LONGEST, vocab_size=VOCAB)
    reason = offer(collector, item)
    assert (reason is None) is may_be_trained(item), reason
    assert reason is None or reason in REASONS
    if reason is None:
        pairs = zip(item["input_ids"], item["attention_mask"].sum(1), strict=True)
        rows = [ids[: int(n)].numpy() for ids, n in pairs]
        tree = PrefixTree.from_sequences(rows)
        assert collector.total.num_sequences == len(rows)
        assert collector.total.num_tree_tokens == tree.num_tree_tokens
        batch = collector.take([7])
        assert len(batch.owners) == len(rows) and collector.total.num_sequences == 0


def with_ones(**changes):
    """Two rows of three tokens."""
    ones = torch.ones(2, 3, dtype=torch.int32)
    return {"input_ids": ones, "attention_mask": ones.bool(), **changes}


# What once went through, or crashed
REGRESSIONS = [
    with_ones(rewards=torch.tensor([math.nan, 1.0])),
    with_ones(loss_mask=torch.zeros(2, 3)),
    with_ones(logprobs=torch.zeros(2, 2)),
    with_ones(versions=torch.full((2, 3), 4)),
    with_ones(input_ids=torch.full((2, 3), VOCAB)),
    with_ones(input_ids=torch.ones(2, 3)),
    with_ones(attention_mask=torch.full((2, 3), math.nan)),
    with_ones(rewards=torch.ones(2, dtype=torch.complex64)),
    with_ones(logprobs=torch.zeros(2, 3).to_sparse()),
    with_ones(loss_mask="text"),
    {"input_ids": torch.ones(1, 0, dtype=torch.int32)},
    {},
    {1: 2, "a": 3},
]

STEPS = st.lists(damages(), max_size=3)
_settings = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("item", REGRESSIONS, ids=range(len(REGRESSIONS)))
def test_regressions(item):
    collector = Collector(max_sequence_tokens=LONGEST, vocab_size=VOCAB)
    assert offer(collector, item) in REASONS


@given(valid(), STEPS)
@settings(_settings, max_examples=200)
@example(with_ones(), [])
def test_damaged_trajectories(item, changes):
    check(item, changes)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_damaged_trajectories(part):
    @seed(part)
    @given(valid(), STEPS)
    @settings(_settings, max_examples=1000, database=None)
    def of_part(item, changes):
        check(item, changes)

    of_part()


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=3), inner)
    ),
    max_leaves=8,
)


@given(_ANYTHING)
@settings(_settings, max_examples=100)
def test_results_that_are_anything(item):
    collector = Collector(max_sequence_tokens=LONGEST, vocab_size=VOCAB)
    assert offer(collector, item) in REASONS
