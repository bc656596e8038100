"""The dispatch benchmark's batches, plans, ranks and tables; never its timings."""

import json
import time

import bench_dispatch
import numpy as np
import pytest
from bench.dispatch_batches import batch_of, gsm8k, replicated, tau2_workload
from bench.dispatch_ranks import RankJob, run_ranks
from bench.dispatch_table import METHODS
from bench.workloads import Sizes

from areal_dta.tree import LeafOrder, PrefixTree

SIZES = Sizes(vocab_size=512, path_tokens=120, max_sequences=24)


@pytest.fixture(scope="module")
def workload():
    return tau2_workload("tau2-airline", SIZES, None)


def test_episodes_are_groups(workload):
    episodes, groups = workload
    assert len(groups) == len(episodes.sequences)
    assert groups.max() == 1 and (np.diff(groups) >= 0).all()  # 16 calls an episode


def test_a_batch_counts_what_is_computed(workload):
    episodes, groups = workload
    batch = batch_of(episodes, groups)
    cut = [
        s[: int(np.flatnonzero(m)[-1])]
        for s, m in zip(episodes.sequences, episodes.loss_masks, strict=True)
    ]
    assert batch.order.num_tree_tokens == PrefixTree.from_sequences(cut).num_tree_tokens
    assert batch.num_outputs.sum() == episodes.num_loss_tokens


def test_copies_share_only_what_all_sequences_do(workload):
    batch = batch_of(*workload)
    n = len(batch.order)
    large = replicated(batch, 3 * n - 1)
    assert len(large.order) == 3 * n
    common = int(batch.order.lcp_N[1:].min())
    tokens = batch.order.num_tree_tokens
    assert large.order.num_tree_tokens == 3 * tokens - 2 * common
    assert large.num_outputs.sum() == 3 * batch.num_outputs.sum()
    assert len(set(large.groups.tolist())) == 3 * len(set(batch.groups.tolist()))


def test_gsm8k_answers_share_their_question():
    batch = gsm8k(100, seed=0)
    assert len(batch.order) == 100 and batch.groups.max() == 6
    LeafOrder.from_arrays(batch.order.length_N, batch.order.lcp_N)  # checks them
    first = np.flatnonzero(np.diff(batch.groups)) + 1
    assert (batch.order.lcp_N[first] == 20).all()
    inner = np.setdiff1d(np.arange(1, 100), first)
    assert (batch.order.lcp_N[inner] >= 80).all()


def test_ranks_that_take_too_long_are_killed_and_named(workload):
    job = RankJob("tiny", workload[0], 0, 64, 1, ((0,),), {}, timeout_seconds=0.2)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="1 ranks took more than 0 s"):
        run_ranks(job, 1)
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_a_rank_that_fails_is_reported(workload):
    job = RankJob("no-such", workload[0], 0, 64, 1, ((0,),), {}, timeout_seconds=120)
    with pytest.raises(RuntimeError, match="rank 0 failed"):
        run_ranks(job, 1)


def test_the_whole_script(tmp_path, capsys):
    path = tmp_path / "out.json"
    bench_dispatch.main(
        f"--model tiny --data none --real-ranks 2 --path-tokens 120 --repeats 1 "
        f"--real-sequences 24 --block-tokens 64 --sequences 60 --ranks 1,3 "
        f"--timeout 120 --json {path}".split()
    )
    printed = capsys.readouterr().out
    assert "### Measured" in printed and "### Simulated" in printed
    content = json.loads(path.read_text())
    measured = content["measured"]
    assert [row["method"] for row in measured] == ["tokens", "tree_tokens", "ours"]
    for row in measured:
        assert len(row["measured_seconds"]) == len(row["predicted_seconds"]) == 2
        assert min(row["measured_seconds"]) > 0
    norms = [row["gradient_norm"] for row in measured]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)  # whoever trains what
    simulated = content["simulated"]
    assert [(r["batch"], r["num_ranks"]) for r in simulated] == [
        (batch, ranks) for batch in ("tau2-airline", "gsm8k") for ranks in (1, 3)
    ]
    for row in simulated:
        assert set(row["over_ideal"]) == set(METHODS)
        assert min(row["over_ideal"].values()) >= 1 - 1e-9
        if row["num_ranks"] == 1:
            assert max(row["over_ideal"].values()) == pytest.approx(1)
            assert max(row["repeated_tokens"].values()) == 0
