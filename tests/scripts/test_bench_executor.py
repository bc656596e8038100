"""The benchmark's counts, gradients, workloads and outputs; never its timings."""

import json
import subprocess
import sys
from pathlib import Path

import bench_executor
import numpy as np
import pytest
import torch
from bench.measure import Bench
from bench.memory import LiveBytes, peak_bytes
from bench.models import build_model
from bench.replayed import replay, why_not_replayed
from bench.table import WorkloadReport, workload_section
from bench.variants import VARIANTS, PerSequence, RunCounts, make_variant
from bench.work import Work
from bench.workloads import (
    EPISODES,
    Sizes,
    Workload,
    load,
    make_workloads,
    renumbered,
    thinned,
)

from areal_dta.plan import FlopModel, Reads
from areal_dta.tree import PrefixTree

CPU = torch.device("cpu")
SIZES = Sizes(vocab_size=512, path_tokens=150, prompt_tokens=10)
COLUMNS = [
    "variant",
    "seconds",
    "tokens/s",
    "ratio to dense",
    "FLOP bound",
    "efficiency",
    "peak memory",
    "blocks",
    "tokens run",
    "gradient error",
]


@pytest.fixture(scope="module")
def model():
    return build_model("tiny", torch.float32, CPU, seed=0)


def work_of(name: str, sizes: Sizes = SIZES, answer_tokens: int = 6) -> Work:
    (workload,) = make_workloads(name, sizes, [answer_tokens], None)
    return Work.of(workload, CPU, seed=0)


def hand_made(*words: str, loss_tokens: int = 1) -> Work:
    sequences = tuple(np.array([ord(c) for c in word]) for word in words)
    masks = tuple(np.arange(len(s)) >= len(s) - loss_tokens for s in sequences)
    return Work.of(Workload("hand-made", "test", sequences, masks), CPU, seed=0)


# ---- the whole script


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What one run prints and what it writes."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    argv = "--model tiny --data none --device cpu --repeats 2 --path-tokens 100 "
    argv += "--workloads tau2-airline,grpo-short,no-sharing --answer-tokens 4,12 "
    argv += "--prompt-tokens 10 --max-sequences 8 "
    argv += f"--variants {','.join(VARIANTS)},dta@16/0 --json {path}"
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *a, **_: printed.append(" ".join(a)))
        bench_executor.main(argv.split())
    torch.set_num_threads(threads)
    return "\n".join(printed), json.loads(path.read_text())


def test_every_variant_has_the_gradients_of_dense(output):
    _, written = output
    names = [w["name"] for w in written["workloads"]]
    assert names == [
        "tau2-airline",
        "grpo-short/4",
        "grpo-short/12",
        "no-sharing",
    ]
    for workload in written["workloads"]:
        measured = {m["variant"]: m for m in workload["measurements"]}
        assert list(measured) == [*VARIANTS, "dta@16/0"]
        assert measured["dense"]["gradient_error"] == 0.0
        for name, m in measured.items():
            assert m["gradient_error"] < 3e-6, (workload["name"], name)
            assert len(m["seconds"]) == len(m["ratios"]) == 2
            assert m["peak_bytes"] > 0 and m["failure"] is None
        assert measured["dense"]["bound"] == measured["dense"]["ratio"] == 1.0
        assert measured["dta"]["bound"] >= measured["dfs"]["bound"] >= 1.0


def test_counts_say_what_each_variant_runs(output):
    _, written = output
    for workload in written["workloads"]:
        runs = {
            m["variant"]: (m["num_blocks"], m["num_tokens"])
            for m in workload["measurements"]
        }
        num_sequences = workload["num_sequences"]
        num_tokens, tree_tokens = (
            workload["num_sequence_tokens"],
            workload["num_tree_tokens"],
        )
        assert runs["dense"] == (num_sequences, num_tokens)
        assert runs["dense_ckpt"] == (num_sequences, 2 * num_tokens)
        num_trees = 8 if workload["name"] == "no-sharing" else 1
        assert runs["packed"] == (num_trees, tree_tokens)
        # dfs runs each node, and those with children a second time, with all outputs;
        # dta leaves out what no loss depends on.
        assert workload["num_nodes"] <= runs["dfs"][0] <= 2 * workload["num_nodes"]
        assert runs["dta"][1] <= tree_tokens
        assert runs["dta"][0] < runs["dfs"][0] or num_trees > 1
        assert runs["dta@16/0"][0] > runs["dta"][0]


def test_markdown_has_a_header_and_a_row_a_variant(output):
    printed, written = output
    assert f"torch {torch.__version__}" in printed
    assert "seed 0" in printed and "rounds 2" in printed and "tiny (" in printed
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    num_variants = len(VARIANTS) + 1
    assert len(rows) == len(written["workloads"]) * (num_variants + 2)
    assert all(len(row) == len(COLUMNS) for row in cells)
    assert cells[0] == COLUMNS
    assert [row[0] for row in cells[2 : num_variants + 2]] == [*VARIANTS, "dta@16/0"]
    first = written["workloads"][0]["measurements"][0]
    assert cells[2][1] == f"{first['median_seconds']:.3f}"


def test_needs_no_areal():
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import bench_executor; "
        "print([m for m in sys.modules if m.split('.')[0] == 'areal'])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_dense_is_always_there_and_first():
    assert bench_executor.variant_names("dta,dense,dta") == ["dense", "dta"]
    assert bench_executor.variant_names("dfs") == ["dense", "dfs"]


@pytest.mark.parametrize("name", ["dens", "packed@5", "dta@x"])
def test_unknown_variants_are_refused(model, name):
    with pytest.raises(ValueError, match="expected|invalid literal"):
        make_variant(name, model, {})


# ---- measuring


class Wrong(PerSequence):
    """Learns from the first sequence only."""

    def run(self, work):
        return super().run(work.subset([0]))


class TooLarge(PerSequence):
    def run(self, work):
        raise torch.OutOfMemoryError("too large")


def test_wrong_gradients_show(model):
    bench = Bench(model, [PerSequence("dense", model), Wrong("wrong", model)])
    _, wrong = bench.measure(work_of("grpo-short"), repeats=1)
    assert wrong.gradient_error is not None and wrong.gradient_error > 0.1


def test_a_variant_out_of_memory_does_not_stop_the_others(model):
    variants = [PerSequence("dense", model), TooLarge("huge", model)]
    variants.append(make_variant("dta", model, {}))
    work = work_of("grpo-short")
    measured = Bench(model, variants).measure(work, repeats=1)
    assert [m.failure for m in measured] == [None, "out of memory", None]
    assert measured[2].ratio is not None
    table = workload_section(WorkloadReport.of(work, measured))
    assert "| huge | out of memory | - | - |" in table


def test_without_dense_there_are_no_ratios(model):
    variants = [TooLarge("dense", model), make_variant("dta", model, {})]
    _, dta = Bench(model, variants).measure(work_of("grpo-short"), repeats=1)
    assert dta.seconds and dta.ratio is None and dta.gradient_error is None


def test_time_limit_ends_the_rounds(model):
    bench = Bench(model, [PerSequence("dense", model)])
    (dense,) = bench.measure(work_of("grpo-short"), repeats=9, max_seconds=1e-9)
    assert len(dense.seconds) == 1


class Recording(PerSequence):
    """Notes what it is run on."""

    def run(self, work):
        self.lengths = work.lengths
        return RunCounts(work.num_sequences, sum(work.lengths))


def test_a_sample_of_dense_is_scaled_by_flops(model):
    work = hand_made("abcdefgh", "abc", "xyzu", "ab", loss_tokens=1)
    variant = Recording("dense", model)
    sample = variant.sample(work, 2)
    assert sample.lengths == [8, 2]
    assert sample.weights == [work.weights[0], work.weights[3]]
    assert variant.sample(work, 4) is work
    clock = iter(range(100))
    bench = Bench(model, [variant], clock=lambda: next(clock))
    (dense,) = bench.measure(work, repeats=1, dense_sample=2)
    assert variant.lengths == [8, 2] and dense.sample == 2
    flops = FlopModel.from_config(model.config)
    factor = flops.dense([8, 3, 4, 2]) / flops.dense([8, 2])
    assert dense.seconds == [pytest.approx(factor)]  # the clock ticks once a run
    table = workload_section(WorkloadReport.of(work, [dense]))
    assert f"~{factor:.3f} (2 of 4)" in table


def test_gradients_are_checked_on_the_sample(model):
    variants = [make_variant(name, model, {}) for name in VARIANTS]
    work = work_of("tau2-airline")
    for m in Bench(model, variants).measure(work, repeats=1, dense_sample=3):
        assert m.gradient_error is not None and m.gradient_error < 3e-6, m
        assert (m.sample is not None) == (m.variant in ("dense", "dense_ckpt", "leaf"))


# ---- variants


def test_leaf_reads_prefixes_and_duplicates_off_the_longest(model):
    work = hand_made("abcd", "ab", "abx", "a", "abcd", "q", loss_tokens=1)
    leaf = make_variant("leaf", model, {})
    assert leaf.run(work) == RunCounts(3, 4 + 3 + 1)
    measured = Bench(model, [PerSequence("dense", model), leaf]).measure(work, 1)
    assert measured[1].gradient_error is not None
    assert measured[1].gradient_error < 3e-6


def test_dfs_runs_one_node_a_call_and_again_where_it_forks(model):
    work = hand_made("abcdeX", "abcdYY", "abQ", loss_tokens=1)
    nodes = {"ab": 2, "cd": 2, "eX": 2, "YY": 2, "Q": 1}
    # a leaf's last token predicts nothing, so it is not run, and "Q" not at all
    leaves = {"eX": 1, "YY": 1, "Q": 0}
    inner = [n for name, n in nodes.items() if name not in leaves]
    counts = make_variant("dfs", model, {}).run(work)
    assert counts == RunCounts(
        2 * len(inner) + 2, 2 * sum(inner) + sum(leaves.values())
    )


def test_bounds_follow_from_what_is_computed(model):
    work = work_of("tau2-airline")
    flops = FlopModel.from_config(model.config)
    least = {n: make_variant(n, model, {}).least_flops(work) for n in VARIANTS}
    bounds = {name: least["dense"] / least[name] for name in VARIANTS}
    reads = Reads.at(work.tree, work.positions)
    assert bounds["packed"] == bounds["dfs"] == flops.bound(work.tree)
    assert bounds["dta"] == flops.bound(work.tree, reads=reads) > bounds["packed"]
    assert bounds["leaf"] == bounds["dense_ckpt"] == 1.0


def test_checkpointing_is_switched_off_again(model):
    make_variant("dense_ckpt", model, {}).run(work_of("grpo-short"))
    assert not model.is_gradient_checkpointing


# ---- memory


def test_live_bytes_follow_the_graph():
    x = torch.randn(1000, requires_grad=True)
    with LiveBytes([x]) as counter:
        y = x.exp()  # kept by itself and by its own backward
        view = y[10:].view(-1)
        assert counter.live == 4000
        z = y.exp()
        del y, view
        assert counter.live == 8000
        total = z.sum()
        del z
        assert counter.live == 8004
        total.backward()  # leaves x.grad alone
        del total
        assert counter.live == 4000
    assert counter.peak >= 12000


def test_live_bytes_leave_out_what_was_there():
    x = torch.zeros(1000)
    with LiveBytes([x]) as counter:
        x.add_(1.0)
        x[5:].mul_(2.0)
    assert counter.peak == 0


def test_peak_leaves_out_parameter_gradients():
    layer = torch.nn.Linear(100, 100, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)
    peak = peak_bytes(lambda: layer(torch.ones(1, 100)).sum().backward(), layer)
    assert 40_000 <= peak < 60_000  # the new gradient, before it is added


def test_recomputing_costs_less_memory_than_one_block(model):
    work = work_of("tau2-airline", Sizes(vocab_size=512, path_tokens=400))
    names = ["dense", "packed", "dta@64/0"]
    bench = Bench(model, [make_variant(name, model, {}) for name in names])
    _, packed, dta = bench.measure(work, repeats=1)
    assert packed.peak_bytes is not None and dta.peak_bytes is not None
    assert dta.peak_bytes < 0.5 * packed.peak_bytes


# ---- workloads


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


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_replayed_files_are_read(tmp_path):
    path = save(
        tmp_path / "tau2-airline.npz",
        tokens=np.array([900, 5, 6, 900, 5, 7, 8], np.int32),
        offsets=np.array([0, 3, 7]),
        loss_mask=np.array([1, 0, 1, 0, 0, 1, 1], bool),
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
    path = save(tmp_path / "a.npz", tokens=np.arange(3), offsets=np.array([0, 3]))
    with pytest.raises(ValueError, match="lacks .*loss_mask"):
        load("tau2-airline", path, SIZES)
    path = save(
        path, tokens=np.arange(3), offsets=np.array([0, 9]), loss_mask=np.ones(3)
    )
    with pytest.raises(ValueError, match="3 tokens.*up to 9"):
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
