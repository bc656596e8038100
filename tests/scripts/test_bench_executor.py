"""The benchmark's counts, gradients, workloads and outputs; never its timings."""

import json
import subprocess
import sys
from pathlib import Path

import bench_executor
import pytest
import torch
from bench.measure import Bench
from bench.models import build_model
from bench.table import workload_report, workload_section
from bench.variants import VARIANTS, PerSequence, RunCounts, make_variant

from areal_dta.schedule import FlopModel, NeededOutputs
from tests.scripts.works import CPU, hand_made, work_of

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


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What one run prints and what it writes."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    argv = "--model tiny --data none --device cpu --repeats 2 --path-tokens 100 "
    argv += "--workloads tau2-airline,grpo-short,no-sharing --answer-tokens 4,12 "
    argv += "--prompt-tokens 10 --max-sequences 8 "
    argv += f"--variants {','.join(VARIANTS)},dta_alone,dta@16/0 --json {path}"
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
        assert list(measured) == [*VARIANTS, "dta_alone", "dta@16/0"]
        assert measured["dense"]["gradient_error"] == 0.0
        for name, m in measured.items():
            assert m["gradient_error"] < 3e-6, (workload["name"], name)
            assert len(m["seconds"]) == len(m["ratios"]) == 2
            assert m["peak_bytes"] > 0 and m["failure"] is None
        assert measured["dense"]["bound"] == measured["dense"]["ratio"] == 1.0
        assert measured["dta"]["bound"] >= measured["dfs"]["bound"] >= 1.0
        lean = measured["dense_lean"]["bound"]
        assert 1.0 < lean < measured["dta"]["bound"] or measured["dta"]["bound"] < 1.1


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
        assert runs["dense_lean"] == runs["dense"]
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
    num_variants = len(VARIANTS) + 2
    assert len(rows) == len(written["workloads"]) * (num_variants + 2)
    assert all(len(row) == len(COLUMNS) for row in cells)
    assert cells[0] == COLUMNS
    names = [*VARIANTS, "dta_alone", "dta@16/0"]
    assert [row[0] for row in cells[2 : num_variants + 2]] == names
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


def test_areal_s_packed_trees_have_the_gradients_of_dense(model):
    work = hand_made("abcde", "abcfg", "xyz")
    bench = Bench(model, [make_variant(name, model, {}) for name in ("dense", "areal")])
    _, areal = bench.measure(work, repeats=1)
    assert areal.gradient_error < 3e-6
    assert areal.num_tokens == 128  # padded


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
    table = workload_section(workload_report(work, measured))
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
    table = workload_section(workload_report(work, [dense]))
    assert f"~{factor:.3f} (2 of 4)" in table


def test_gradients_are_checked_on_the_sample(model):
    variants = [make_variant(name, model, {}) for name in VARIANTS]
    work = work_of("tau2-airline")
    for m in Bench(model, variants).measure(work, repeats=1, dense_sample=3):
        assert m.gradient_error is not None and m.gradient_error < 3e-6, m
        assert (m.sample is not None) == (
            m.variant in ("dense", "dense_lean", "dense_ckpt", "leaf")
        )


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
    least = {n: make_variant(n, model, {}).min_flops(work) for n in VARIANTS}
    bounds = {name: least["dense"] / least[name] for name in VARIANTS}
    needed = NeededOutputs.logprobs_at(work.tree, work.positions)
    dense = flops.dense(work.lengths)
    assert bounds["packed"] == bounds["dfs"] == dense / flops.tree(work.tree)
    assert bounds["dta"] == dense / flops.tree(work.tree, needed=needed)
    assert bounds["dta"] > bounds["packed"]
    assert bounds["leaf"] == bounds["dense_ckpt"] == 1.0


def test_checkpointing_is_switched_off_again(model):
    make_variant("dense_ckpt", model, {}).run(work_of("grpo-short"))
    assert not model.is_gradient_checkpointing


def test_packed_dense_and_auto_have_the_gradients_of_dense(model):
    """Gradients summed in fp32 after each backward are the same gradients."""
    work = hand_made("abcdef", "abcxyz", "abcxyzq", "zz", loss_tokens=2)
    dense, packed, auto = (
        make_variant(name, model, {}) for name in ("dense", "dense_packed", "dta_auto")
    )
    want = None
    for variant in (dense, packed, auto):
        model.zero_grad(set_to_none=True)
        variant.run(work)
        got = torch.cat([p.grad.flatten() for p in model.parameters()])
        want = got.clone() if want is None else want
        assert float((got - want).norm() / want.norm()) < 1e-5, variant.name
    model.zero_grad(set_to_none=True)
    assert packed.min_flops(work) == dense.min_flops(work)


def test_packs_hold_whole_sequences():
    from bench.packed_dense import pack

    packs = pack([5, 9, 3, 7, 20], max_tokens=12)
    assert packs == [[4], [1, 2], [3, 0]]  # one that is longer stays alone
