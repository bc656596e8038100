"""Generated and replayed workloads have the shape that was measured."""

import numpy as np
import pytest
from bench.replayed import replay, why_not_replayed
from bench.workloads import (
    EPISODES,
    Sizes,
    load,
    make_workloads,
    renumbered,
    thinned,
)

from areal_dta.tree import PrefixTree
from tests.scripts.works import SIZES, hand_made, work_of


@pytest.mark.parametrize(
    "name, share, ratio",
    [
        ("tau2-airline", (0.013, 0.026), (7, 12)),
        ("tau2-telecom-solo", (0.0015, 0.003), (8, 12)),
    ],
)
def test_generated_episodes_have_the_measured_shape(name, share, ratio):
    sizes = Sizes(vocab_size=32768, max_sequences=EPISODES[name].num_calls)
    work = work_of(name, sizes)
    assert work.num_sequences == EPISODES[name].num_calls
    loss_share = work.workload.num_loss_tokens / work.workload.num_tokens
    assert share[0] < loss_share < share[1]
    assert ratio[0] < work.tree.sharing_ratio < ratio[1]
    shortest = min(work.lengths)
    assert shortest > EPISODES[name].system_tokens
    again = work_of(name, sizes)
    assert all(map(np.array_equal, work.workload.sequences, again.workload.sequences))


def test_templates_differ_in_what_the_history_keeps():
    def leaves_and_loss(template):
        work = work_of("tau2-airline", Sizes(512, path_tokens=2000, template=template))
        leaves = sum(not node.children for node in work.tree.nodes)
        return leaves, work.workload.num_loss_tokens

    (plain, _), (empty, few), (think, many) = map(
        leaves_and_loss, ["plain", "empty-think", "think"]
    )
    assert (plain, empty, think) == (1, 16, 16)
    assert many > 1.5 * few


def test_path_tokens_set_the_longest_sequence():
    for path_tokens in (500, 16384):
        work = work_of("tau2-telecom-solo", Sizes(32768, path_tokens=path_tokens))
        assert 0.9 < work.tree.max_depth / path_tokens < 1.1


def test_episodes_share_the_system_prompt_only():
    work = work_of("tau2-airline", Sizes(32768, max_sequences=32))
    (root,) = [node for node in work.tree.nodes if node.parent < 0]
    assert root.num_tokens == EPISODES["tau2-airline"].system_tokens
    assert len(root.children) == 2


def test_grpo_and_no_sharing():
    grpo = work_of("grpo-short", answer_tokens=7)
    assert grpo.lengths == [17] * 16 and grpo.tree.num_tree_tokens == 10 + 16 * 7
    assert [p.tolist() for p in grpo.positions] == [[False] * 9 + [True] * 7] * 16
    alone = work_of("no-sharing")
    assert alone.tree.sharing_ratio == 1.0
    assert all(p.all() for p in alone.positions)


def test_limits_drop_whole_sequences_from_the_end():
    full = work_of("grpo-short", answer_tokens=10)
    few = work_of("grpo-short", Sizes(512, prompt_tokens=10, max_sequences=3), 10)
    assert few.lengths == full.lengths[:3]
    short = work_of("grpo-short", Sizes(512, prompt_tokens=10, max_tokens=59), 10)
    assert short.lengths == [20, 20]
    assert work_of("grpo-short", Sizes(512, max_tokens=1)).num_sequences == 1


def test_thinning_keeps_the_shape_of_the_tree():
    workload = work_of("tau2-airline", Sizes(32768, template="think")).workload
    small = thinned(workload, 1000)
    before, after = map(
        PrefixTree.from_sequences, (workload.sequences, small.sequences)
    )
    assert len(before.nodes) == len(after.nodes)
    assert [n.children for n in before.nodes] == [n.children for n in after.nodes] or (
        sorted(len(n.children) for n in before.nodes)
        == sorted(len(n.children) for n in after.nodes)
    )
    assert 0.95 < after.max_depth / 1000 < 1.05
    assert after.sharing_ratio == pytest.approx(before.sharing_ratio, rel=0.05)
    shares = [w.num_loss_tokens / w.num_tokens for w in (workload, small)]
    assert shares[1] == pytest.approx(shares[0], rel=0.1)
    assert thinned(small, 10_000) is small


def test_renumbering_keeps_the_tree_and_refuses_too_many_tokens():
    work = hand_made("abz", "abc", "q")
    small = renumbered(work.workload, 8)
    assert max(int(s.max()) for s in small.sequences) < 8
    tree = PrefixTree.from_sequences(small.sequences)
    assert tree.num_tree_tokens == work.tree.num_tree_tokens
    with pytest.raises(ValueError, match="5 distinct tokens.*vocabulary 4"):
        renumbered(work.workload, 4)


# What a replayed file says of its two sequences beside their tokens.
LABELS = {
    "domain": np.array(["airline"] * 2),
    "task_id": np.array(["1", "2"]),
    "trial": np.zeros(2, np.int32),
    "episode": np.arange(2, dtype=np.int32),
    "call": np.zeros(2, np.int32),
    "reward": np.zeros(2, np.float32),
}


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_replayed_files_are_read(tmp_path):
    path = save(
        tmp_path / "tau2-airline.npz",
        tokens=np.array([900, 5, 6, 900, 5, 7, 8], np.int32),
        offsets=np.array([0, 3, 7]),
        loss_mask=np.array([1, 0, 1, 0, 0, 1, 1], bool),
        **LABELS,
    )
    (workload,) = make_workloads("tau2-airline", SIZES, [1], path.parent)
    assert workload.source == "tau2-airline.npz"
    assert [s.tolist() for s in workload.sequences] == [[4, 0, 1], [4, 0, 2, 3]]
    # nothing predicts a first token, whatever its mask says
    assert [m.tolist() for m in workload.loss_masks] == [
        [False, False, True],
        [False, False, True, True],
    ]
    (other,) = make_workloads("tau2-telecom-solo", SIZES, [1], path.parent)
    assert other.source == "generated"


def test_other_files_are_refused(tmp_path):
    tokens = np.arange(7, dtype=np.int32)
    path = save(tmp_path / "a.npz", tokens=tokens, offsets=np.array([0, 3, 7]))
    with pytest.raises(ValueError, match="a.npz holds no sequences .*loss_mask"):
        load("tau2-airline", path, SIZES)
    arrays = {"offsets": np.array([0, 3, 9]), "loss_mask": np.ones(7, bool)}
    path = save(path, tokens=tokens, **arrays, **LABELS)
    with pytest.raises(ValueError, match="expected offsets that rise from 0 to the nu"):
        load("tau2-airline", path, SIZES)
    with pytest.raises(ValueError, match="'tau3'.*expected one of"):
        make_workloads("tau3", SIZES, [1], None)


@pytest.mark.slow
def test_recorded_episodes_are_replayed(tmp_path):
    if reason := why_not_replayed():
        pytest.skip(reason)
    path = replay("tau2-airline", tmp_path, "empty-think", 12, None)
    sizes = Sizes(vocab_size=32768, path_tokens=300, max_sequences=8)
    workload = load("tau2-airline", path, sizes)
    assert len(workload.sequences) == 8
    assert PrefixTree.from_sequences(workload.sequences).sharing_ratio > 3
