"""What the collector takes in, rejects, evicts and hands out."""

import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_dta.collector.collector import Collector
from areal_dta.collector.planned_batch import PlannedBatch, to_planned_batch
from areal_dta.collector.planner import BatchPlanner
from areal_dta.collector.rejections import REASONS, Rejected, RejectionWatch
from areal_dta.collector.validate_trajectory import validate_trajectory
from areal_dta.schedule import FlopModel
from areal_dta.tree.prefix_forest import PrefixForest
from tests.engine.builders import VOCAB_SIZE
from tests.engine.dispatch_scenarios import make_items


def items_of(num, seed=0):
    sizes = np.random.default_rng(seed).integers(1, 6, num).tolist()
    return make_items(sizes, seed)


def test_what_it_knows_of_what_waits():
    collector = Collector()
    first, second = make_items((3, 2))
    collector.offer(4, first, version=0)
    collector.offer(2, second, version=0)
    assert collector.waiting_task_ids == [2, 4]
    total = collector.total
    assert total.num_sequences == 5
    lengths = [int(x["attention_mask"].sum()) for x in (first, second)]
    assert total.num_sequence_tokens == sum(lengths) > total.num_tree_tokens
    sequences = collector.take([4])
    assert sorted(sequences.owners) == [(0, 0), (0, 1), (0, 2)]
    assert sequences.order.num_sequence_tokens == lengths[0]
    assert sequences.stats.num_sequence_tokens == lengths[0]
    assert collector.waiting_task_ids == [2]
    assert collector.total.num_sequence_tokens == lengths[1]


def test_predicted_seconds_grow_with_the_tree():
    planner = BatchPlanner(FlopModel(per_token=1e6, per_pair=10, per_output=1e5))
    collector = Collector()
    seconds = []
    for number, item in enumerate(items_of(5)):
        collector.offer(number, item, 0)
        seconds.append(planner.seconds(collector.total))
    assert 0 < seconds[0] and seconds == sorted(seconds) and seconds[-1] > seconds[0]
    forest = PrefixForest()
    for i, item in enumerate(items_of(5)):
        validate_trajectory(item, None).insert_into(forest, i)
    assert forest.total == collector.total
    of_trees = sum(planner.seconds(t) for t in forest.trees.values())
    # a block of its own for each tree, at least
    assert of_trees >= seconds[-1]


def broken(change):
    (item,) = make_items((3,))
    change(item)
    return item


def unpad_left(item):
    item["attention_mask"][0, 0] = False


BROKEN = {
    "shape": [
        lambda item: item.pop("input_ids"),
        lambda item: item.update(loss_mask=item["loss_mask"][:, 1:]),
        lambda item: item.update(rewards=item["rewards"][:2]),
        lambda item: item.update(logprobs=item["logprobs"][:, :-1]),
        lambda item: item.update(input_ids=item["input_ids"][0]),
        lambda item: item.update({key: value[:0] for key, value in item.items()}),
        lambda item: item["attention_mask"].__setitem__(1, False),
        unpad_left,
    ],
    "dtype": [
        lambda item: item.update(input_ids=item["input_ids"].float()),
        lambda item: item.update(input_ids=item["input_ids"].tolist()),
        lambda item: item.update(versions=item["versions"].float()),
        lambda item: item.update(logprobs=item["logprobs"].int()),
        lambda item: item.update(logprobs=item["logprobs"].to("meta")),
        lambda item: item.update(rewards=item["rewards"] > 0),
        lambda item: item.update(attention_mask=2 * item["attention_mask"].int()),
        lambda item: item["loss_mask"].__setitem__((0, 1), 7),
        lambda item: item.update(rewards="good"),
    ],
    "vocabulary": [
        lambda item: item["input_ids"].__setitem__((0, 0), -5),
        lambda item: item["input_ids"].__setitem__((1, 0), VOCAB_SIZE),
    ],
    "no_loss": [lambda item: item["loss_mask"].zero_()],
    "version": [
        lambda item: item["versions"].__setitem__((0, 1), 4),
        lambda item: item["versions"].__setitem__((0, 1), -2),
    ],
    "images": [
        lambda item: item.update(multi_modal_input=[{}, {"pixel_values": 1}, {}]),
        lambda item: item.update(pixel_values=torch.ones(1, 3)),
    ],
    "nan": [
        lambda item: item["rewards"].__setitem__(0, torch.nan),
        lambda item: item["logprobs"].__setitem__((0, 1), torch.inf),
    ],
    "too_long": [lambda item: None],
    "stale": [lambda item: item.update(versions=item["versions"] - 1)],
}
CASES = [(reason, change) for reason, cs in BROKEN.items() for change in cs]


@pytest.mark.parametrize("reason, change", CASES, ids=range(len(CASES)))
def test_what_cannot_be_trained_on_is_rejected_and_counted(reason, change):
    longest = 5 if reason == "too_long" else None
    collector = Collector(longest, max_staleness=2, vocab_size=VOCAB_SIZE)
    version = 3 if reason == "stale" else 0
    item = broken(change)
    if reason == "stale":
        item["versions"][item["versions"] < 0] = 0
    with pytest.raises(Rejected) as error:
        collector.offer(0, item, version)
    assert error.value.reason == reason
    assert collector.waiting_task_ids == [] and collector.total.num_sequences == 0
    metrics = collector.take_metrics(1.0)
    counts = {r: metrics[f"collector/rejected/{r}"] for r in REASONS}
    assert counts == {r: float(r == reason) for r in REASONS}
    assert metrics["collector/inserted"] == 0


def test_a_result_is_taken_in_once():
    first, second = make_items((2, 3))
    collector = Collector()
    collector.offer(0, first, 0, source="shard")
    for task_id, source in ((0, "other shard"), (7, "shard")):
        with pytest.raises(Rejected, match="before|another") as error:
            collector.offer(task_id, second, 0, source)
        assert error.value.reason == "duplicate"
    assert collector.total.num_sequences == 2
    collector.take([0])
    with pytest.raises(Rejected, match="before"):
        collector.offer(0, first, 0)
    collector.offer(8, first, 0, source="shard")  # the shard's name is free again


def test_text_of_a_multimodal_workflow_is_taken():
    (item,) = make_items((3,))
    item["multi_modal_input"] = [{}, {}, {}]
    collector = Collector(takes_images=False)
    collector.offer(0, item, 0)
    assert collector.waiting_task_ids == [0]


def test_a_row_without_loss_counts_in_its_group():
    (item,) = make_items((3,))
    item["loss_mask"][0] = 0
    collector = Collector()
    collector.offer(0, item, 0)
    assert collector.total.num_sequences == 3


@pytest.mark.parametrize("max_staleness", [None, 2])
def test_nothing_is_dropped_for_its_age_unless_asked(max_staleness):
    collector = Collector(max_staleness=max_staleness)
    (item,) = make_items((2,))
    item["versions"][item["versions"] >= 0] = 0
    collector.offer(0, item, 2)
    assert collector.find_stale(9) == ([] if max_staleness is None else [0])


def test_each_kind_is_told_once_per_step(monkeypatch):
    messages = []
    monkeypatch.setattr(
        "areal_dta.collector.collector.logger",
        SimpleNamespace(warning=messages.append),
    )
    collector = Collector()
    nan, no_loss = make_items((2, 2))
    nan["rewards"][0] = torch.nan
    no_loss["loss_mask"].zero_()
    for _ in range(2):
        messages.clear()
        for task_id in range(5):
            for item in (nan, no_loss):
                with pytest.raises(Rejected):
                    collector.offer(task_id, item, 0)
        assert len(messages) == 2
        assert "(nan)" in messages[0] and "(no_loss)" in messages[1]
        collector.take([])
    metrics = collector.take_metrics(1.0)
    assert metrics["collector/dropped"] == 20
    assert metrics["collector/rejected/no_loss"] == 10


def verdicts(watch, text):
    """b: bad, f: filtered, .: accepted."""
    for letter in text:
        if letter == ".":
            watch.accept()
        else:
            reason = {"b": "nan", "f": "filtered", "x": "failed"}[letter]
            watch.reject(reason, f"because of {letter}")
    return watch.why_stop()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("bbbbbbb", None),  # less than two batches
        ("bbbb....", None),  # not above the share
        ("bbbbb...", "5 of the last 8 results were rejected (nan 5)"),
        ("bbbbb....", None),  # the first is out of the window
        ("xxxxx...", None),  # failures are not bad trajectories
        ("ffffffff...f", None),
        (".fffffffffff", None),
        (".xfffffffffff", "none of the last 12 results can be trained on (filtered 11"),
    ],
)
def test_when_a_run_stops(text, expected):
    why = verdicts(RejectionWatch(4, 0.5, 3), text)
    assert why is None if expected is None else expected in why
    if expected:
        assert "because of" in why and "collector.max_" in why
    assert verdicts(RejectionWatch(4, 1.0, None), text) is None


def test_padding_may_hold_anything():
    (item,) = make_items((3,))
    outside = ~item["attention_mask"]
    assert outside.any()
    item["logprobs"][outside] = torch.nan
    item["input_ids"][outside] = -1
    Collector().offer(0, item, 0)


def test_what_becomes_stale_while_it_waits_leaves():
    collector = Collector(max_staleness=1)
    for number, version in enumerate((0, 1, 2)):
        (item,) = make_items((2,), seed=number)
        item["versions"][item["versions"] >= 0] = version
        collector.offer(number, item, version)
    assert collector.find_stale(1) == []
    assert collector.find_stale(3) == [0, 1]
    collector.evict([0, 1])
    assert collector.waiting_task_ids == [2] and collector.total.num_sequences == 2
    assert collector.take_metrics(1.0)["collector/evicted_stale"] == 2


def test_a_group_beyond_the_limit_waits_unplanned():
    items = items_of(3)
    collector = Collector(max_tokens=int(items[0]["attention_mask"].sum()))
    for number, item in enumerate(items):
        collector.offer(number, item, 0)
    assert collector.waiting_task_ids == [0, 1, 2]
    held = collector.total.num_sequence_tokens
    assert held == items[0]["attention_mask"].sum()
    assert collector.take([0, 1]) is None  # planned from what is fetched then
    assert collector.waiting_task_ids == [2] and collector.total.num_sequences == 0


def plan_of(collector, items, num_ranks=3, num_minibatches=1):
    sequences = collector.take(range(len(items)))
    batch = PlannedBatch(items, sequences, step=5)
    return batch.plan(BatchPlanner(seed=1), num_ranks, num_minibatches)


def test_a_thousand_orders_of_arrival_give_one_plan():
    items = items_of(5)
    first = None
    for seed in range(1000):
        collector = Collector()
        arrival = list(enumerate(items))
        random.Random(seed).shuffle(arrival)
        for number, item in arrival:
            collector.offer(number, item, 0)
        plan = plan_of(collector, items)
        seen = (
            plan.sequences.owners,
            plan.sequences.order.lcp_N.tolist(),
            plan.minibatches,
        )
        first = first or seen
        assert seen == first


def test_a_batch_that_was_not_collected_gets_the_same_plan():
    items = items_of(6)
    collector = Collector()
    for number, item in enumerate(items):
        collector.offer(number, item, 0)
    collected = plan_of(collector, items)
    fetched = to_planned_batch(items).plan(BatchPlanner(seed=1), 3, 1)
    assert collected.minibatches == fetched.minibatches
    assert collected.sequences.owners == fetched.sequences.owners


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 50])
@pytest.mark.parametrize("num_minibatches", [1, 3, 9])
def test_every_row_is_dealt_once_and_prompts_stay_in_a_minibatch(
    num_ranks, num_minibatches
):
    items = items_of(5)
    plan = to_planned_batch(items).plan(BatchPlanner(), num_ranks, num_minibatches)
    assert len(plan.minibatches) == min(num_minibatches, len(items))
    assert plan.num_ranks == num_ranks
    dealt = [
        (m, *owner)
        for m in range(len(plan.minibatches))
        for rank in range(num_ranks)
        for owner in plan.rows(rank, m)
    ]
    expected = [(i, r) for i, x in enumerate(items) for r in range(len(x["rewards"]))]
    assert sorted((i, r) for _, i, r in dealt) == expected
    assert len({(m, i) for m, i, _ in dealt}) == len(items)


def test_many_threads():
    items = items_of(60)
    collector = Collector()
    numbers = list(range(len(items)))

    def offer(some):
        for number in some:
            collector.offer(number, items[number], 0)

    threads = [threading.Thread(target=offer, args=(numbers[k::6],)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert collector.waiting_task_ids == numbers
    alone = Collector()
    offer_alone = [alone.offer(n, items[n], 0) for n in numbers]
    assert len(offer_alone) == 60 and collector.total == alone.total
    metrics = collector.take_metrics(10.0)
    assert metrics["collector/inserted"] == 60
    assert 0 < metrics["collector/share_of_step"] < 1
    assert collector.take_metrics(10.0)["collector/inserted"] == 0
