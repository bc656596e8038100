"""The projection's log counts what the schedule says, and its replay adds up."""

import json

import numpy as np
import project_gpu
import pytest
import torch
from bench.workloads import Sizes, tau2
from projection import passes
from projection.op_log import Op, Segment, attended
from projection.passes import MODELS, dense_pass, qwen3_config, tree_pass
from projection.rates import CARDS, load_rates
from projection.replay import extrapolated, total, wall_seconds

from areal_dta.executor import ExecutorConfig
from areal_dta.schedule import FlopModel, NeededOutputs, build_schedule
from areal_dta.tree import PrefixTree
from areal_dta.tree.prefix_tree import attended_pairs

SIZES = Sizes(vocab_size=151936, path_tokens=400, max_sequences=5)
WORK = tau2("tau2-airline", SIZES)
TREE = PrefixTree.from_sequences(WORK.sequences)
NEEDED = [mask[1:] for mask in WORK.loss_masks]
RATES = CARDS["h200"]


def flops(segments, kinds, is_backward=None):
    """Sum FLOPs in half precision: angles of rotary embeddings are fp32 products."""
    return sum(
        op.flops
        for segment in segments
        for op in segment.ops
        if op.kind in kinds and is_backward in (None, segment.is_backward)
        if op.is_half
    )


@pytest.mark.parametrize("block_tokens", [128, 4096])
def test_a_tree_s_flops_are_those_of_its_schedule(block_tokens):
    config = qwen3_config("0.6b", 2)
    options = ExecutorConfig(
        block_tokens, None, whole_last_layer=True, logit_chunk_elements=2**62
    )
    found = tree_pass(config, TREE, NEEDED, options)
    needed = NeededOutputs.logprobs_at(TREE, NEEDED)
    schedule = build_schedule(TREE, block_tokens, None, needed=needed)
    model = FlopModel.from_config(config)
    # Products: what the schedule has, and nothing else; twice as many backward.
    products = model.per_token * schedule.num_forward_tokens
    products += model.per_output * needed.num_outputs
    assert flops(found.segments, ["gemm"], False) == pytest.approx(products, rel=1e-9)
    # Blocks whose outputs nobody reads start from the keys that their branches see:
    # in the last layer there is no backward through their attention and what follows.
    share = 1.0 if block_tokens == 4096 else 0.7
    backward = flops(found.segments, ["gemm"], True)
    assert 0.98 * share * 2 * products <= backward <= 2 * products * (1 + 1e-9)
    # Attention: visible pairs once forward, five products for two backward.
    pairs = sum(
        attended_pairs(node.start, node.start + num_tokens)
        for node, num_tokens in zip(TREE.nodes, needed.computed, strict=True)
    )
    attention = flops(found.segments, ["flash forward"])
    assert attention == pytest.approx(model.per_pair * pairs, rel=1e-9)
    flash_backward = flops(found.segments, ["flash backward"])
    assert share * 2.5 * attention <= flash_backward * (1 + 1e-9)
    assert flash_backward <= 2.5 * attention * (1 + 1e-9)
    assert found.num_calls == schedule.num_blocks


@pytest.mark.parametrize("kernel", ["triton_tree", "flash_triton"])
def test_tree_attention_is_counted_by_what_is_seen(kernel):
    """Visible pairs, twice forward; in Triton's backward seven products in place of
    five. Fused layers and partial graphs multiply what was multiplied before."""
    config = qwen3_config("0.6b", 2)

    def run(block_tokens=4096, **options):
        options = {"whole_last_layer": True, **options}
        options = ExecutorConfig(block_tokens, None, **options)
        return tree_pass(config, TREE, NEEDED, options)

    flash, own = run(), run(kernel=kernel)
    kinds = ["flash forward", "flash backward", "tree attention"]
    forward, same = (flops(x.segments, kinds, False) for x in (flash, own))
    assert same == pytest.approx(forward, rel=1e-9)
    by_tree = flops(own.segments, ["tree attention"], False)
    assert by_tree == same  # one block, without a path
    small = run(128, kernel=kernel).segments
    of_small = flops(small, ["tree attention"], False)
    assert flops(small, kinds, False) == pytest.approx(forward, rel=1e-9)
    assert of_small > 0 and (of_small < forward) == (kernel == "flash_triton")
    backward = flops(own.segments, kinds, True)
    expected = 2.5 * forward + by_tree  # two products more
    assert backward == pytest.approx(expected, rel=1e-9)
    products, plain = (
        flops(x.segments, ["gemm"]) for x in (own, run(fused_layers="off"))
    )
    assert products == pytest.approx(plain, rel=1e-9)
    again = run(recompute="mlp")
    mlps = 2.0 * 3 * config.hidden_size * config.intermediate_size * 2  # two layers
    tokens = sum(NeededOutputs.logprobs_at(TREE, NEEDED).computed)
    grown = flops(again.segments, ["gemm"]) - products
    # One product each less: what only the output needs is not run again.
    assert 0.6 * mlps * tokens <= grown <= mlps * tokens
    assert again.peak_bytes < own.peak_bytes


def test_dense_flops_are_those_of_whole_sequences():
    config = qwen3_config("0.6b", 2)
    lengths = [len(s) for s in WORK.sequences]
    own = torch.autograd.backward, torch.autograd.grad
    found = dense_pass(config, lengths)
    assert (torch.autograd.backward, torch.autograd.grad) == own  # nothing is left
    model = FlopModel.from_config(config)
    forward = model.per_token * sum(lengths) + model.per_output * sum(lengths)
    assert flops(found.segments, ["gemm"], False) == pytest.approx(forward, rel=1e-9)
    assert flops(found.segments, ["gemm"], True) == pytest.approx(2 * forward, rel=1e-9)
    pairs = sum(attended_pairs(0, n) for n in lengths)
    assert flops(found.segments, ["flash forward"]) == pytest.approx(
        model.per_pair * pairs, rel=1e-9
    )
    assert found.num_calls == len(passes.pack(lengths)) == 1


def test_layers_are_extrapolated():
    """A model of four layers, from those of two and three, is the one recorded."""
    options = ExecutorConfig(256, 0)
    two, three, four = (
        tree_pass(qwen3_config("0.6b", n), TREE, NEEDED, options) for n in (2, 3, 4)
    )
    guessed = extrapolated(two.segments, three.segments, (2, 3, 4), RATES)
    recorded = [total(segment, RATES) for segment in four.segments]
    for a, b in zip(guessed, recorded, strict=True):
        assert a.launches == b.launches and a.syncs == b.syncs
        assert a.device == pytest.approx(b.device, rel=1e-9)
        assert a.num_bytes == pytest.approx(b.num_bytes, rel=1e-9)
    growth = three.peak_bytes - two.peak_bytes
    assert four.peak_bytes == pytest.approx(three.peak_bytes + growth, rel=0.02)


def test_attended_pairs_of_the_operator():
    one = np.array([3]), np.array([5])
    assert attended(*one, False, None) == 15
    assert attended(*one, True, None) == 3 + 4 + 5
    assert attended(*one, True, 1) == 6  # itself and one key before it
    assert attended(np.array([2, 1]), np.array([2, 4]), True, -1) == 3 + 4


def test_seconds_of_operators():
    large = Op("mm", "gemm", 2 * 8192.0**3, 3 * 2 * 8192.0**2, shape=(8192,) * 3)
    assert RATES.seconds(large) == pytest.approx(2 * 8192**3 / 650e12, rel=0.05)
    # A product of one row is as long as its weight takes to read, or a kernel to start.
    assert RATES.seconds(Op("mm", "gemm", 2.0, 8.0, shape=(1, 1, 1))) == 2.2e-6
    copy = Op("copy_", "copies", 0.0, 3.9e9)
    assert RATES.seconds(copy) == pytest.approx(1e-3)


def test_the_host_runs_ahead_until_it_waits():
    short = Op("add", "element-wise", 0.0, 0.0)
    many = total(Segment(False, [short] * 100), RATES)
    # 100 launches take the host 1 ms, the device 0.22 ms: the host decides.
    assert wall_seconds([many], RATES) == pytest.approx(1e-3)
    long = total(Segment(False, [Op("copy_", "copies", 0.0, 3.9e10)]), RATES)
    assert wall_seconds([long, many], RATES) == pytest.approx(10e-3 + 0.23e-3, rel=0.01)
    waiting = total(Segment(False, [Op("loss", "loss", launches=0, syncs=1)]), RATES)
    waited = wall_seconds([long, waiting, many], RATES)
    assert waited == pytest.approx(10e-3 + 12e-6 + 1e-3, rel=0.01)


def test_rates_from_a_file(tmp_path):
    file = tmp_path / "card.yaml"
    file.write_text("gemm_flops: 1.0e+15\nmultiprocessors: 148\n")
    rates = load_rates(str(file))
    assert (rates.name, rates.gemm_flops, rates.multiprocessors) == ("card", 1e15, 148)
    file.write_text("flops: 3\n")
    with pytest.raises(ValueError, match="unknown .*flops"):
        load_rates(str(file))
    with pytest.raises(ValueError, match="h100"):
        load_rates("nowhere")


def test_the_command(tmp_path, capsys):
    json_file, page = tmp_path / "out.json", tmp_path / "out.md"
    project_gpu.main(
        "--models 0.6b --blocks 256 --choices unfused,tree+mlp --path-tokens 400 "
        f"--max-sequences 3 --layers 4 --json {json_file} --markdown {page}".split()
    )
    content = json.loads(json_file.read_text())
    ways = [(row["way"], row.get("choice")) for row in content["rows"]]
    assert ways == [
        ("dense", None),
        ("dense, checkpointing", None),
        ("dense, fused", None),
        ("dense, fused, checkpointing", None),
        ("tree", "unfused"),
        ("tree", "tree+mlp"),
    ]
    dense, checkpointed, dense_fused, again, unfused, fused = content["rows"]
    assert dense["ratio_to_dense"] == 1.0
    assert checkpointed["milliseconds"] > dense["milliseconds"]
    assert checkpointed["peak_gigabytes"] < dense["peak_gigabytes"]
    assert fused["launches"] < unfused["launches"]
    assert dense_fused["launches"] < dense["launches"]
    assert dense_fused["milliseconds"] < dense["milliseconds"]
    # The baseline gets the same kernels: this ratio is the smaller one.
    ratios = fused["ratio_to_checkpointing"], fused["ratio_to_fused_checkpointing"]
    assert ratios[0] > ratios[1]
    assert ratios[1] == again["milliseconds"] / fused["milliseconds"]
    assert fused["milliseconds_by_kind"]["tree attention"] > 0
    assert "projection, not a measurement" in page.read_text()
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert set(MODELS) >= {"0.6b", "1.7b", "8b", "32b"}
